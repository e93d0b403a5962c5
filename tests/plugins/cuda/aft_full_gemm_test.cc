// AFT-full around a matrix product, here one that rounds its operands and results as a GPU's library would.

#include "aft_full.h"

static Element product_element(const aft::AftFull& call) {
  if (call.precision == aft::Precision::kFloat32) return Element::kFloat32;
  return call.precision == aft::Precision::kFloat16 ? Element::kFloat16 : Element::kBfloat16;
}

static float rounded(float x, Element element) {
  unsigned char memory[4];
  encode(x, element, memory);
  return decode(memory, element);
}

// products[b] = exp(w - row maxima) entries[b]; float16 ends early, so that sums do go beyond it.
static void multiply(const AftFull& formula, Element element, unsigned char* entries,
                     unsigned char* products) {
  const aft::Sequence& s = formula.call;
  const size_t size = element_size(element);
  const int64_t columns = 2 * s.channels;
  std::vector<float> right(s.batch * s.tokens * columns), weights(s.tokens), sums(columns);
  for (size_t i = 0; i < right.size(); ++i) right[i] = decode(entries + i * size, element);
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t u = 0; u < s.tokens; ++u)
      weights[u] = static_cast<float>(formula.bias[t * formula.width + u]);
    const float maximum = *std::max_element(weights.begin(), weights.end());
    for (float& weight : weights) weight = rounded(std::exp(weight - maximum), element);
    for (int64_t b = 0; b < s.batch; ++b) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t u = 0; u < s.tokens; ++u)
        for (int64_t c = 0; c < columns; ++c) sums[c] += weights[u] * right[(b * s.tokens + u) * columns + c];
      unsigned char* row = products + (b * s.tokens + t) * columns * size;
      for (int64_t c = 0; c < columns; ++c) {
        const bool overflows = element == Element::kFloat16 && std::fabs(sums[c]) > 64.0f;
        encode(overflows ? std::copysign(INFINITY, sums[c]) : sums[c], element, row + c * size);
      }
    }
  }
}

static int run(const AftFull& formula, const aft::AftFull* call, void* workspace, cudaStream_t stream) {
  const aft::Sequence& s = *call;
  if (device::only_checks_launches()) {
    const int status = aft_cuda_aft_full_prepare(call, workspace, workspace, stream);
    return status ? status : aft_cuda_aft_full_finish(call, workspace, stream);
  }
  const Element element = product_element(*call);
  const size_t bytes = s.batch * s.tokens * 2 * s.channels * element_size(element);
  Buffer entries(bytes), products(bytes);
  if (const int status = aft_cuda_aft_full_prepare(call, entries.data(), workspace, stream)) return status;
  if (!entries.read()) return -1;
  multiply(formula, element, entries.host(), products.host());
  products.write();
  const int status = aft_cuda_aft_full_finish(call, products.data(), stream);
  return products.read() ? status : -1;
}

int main(int argc, char** argv) {
  return run_cases(argc, argv, [](const Case& c, const Bounds& bounds) {
    Problem problem(c, bounds, c.channels);
    const AftFull formula(problem);
    const auto kernels = [&](const aft::AftFull* call, void* workspace, cudaStream_t stream) {
      return run(formula, call, workspace, stream);
    };
    if (!c.causal) return problem.check(formula.call, aft_cuda_aft_full_prepare_workspace, kernels, formula);
    const bool refused = aft_cuda_aft_full_prepare(&formula.call, nullptr, nullptr, nullptr) != 0 &&
                         aft_cuda_aft_full_finish(&formula.call, nullptr, nullptr) != 0;
    if (!refused) std::printf("FAILED: %s is not refused\n", c.name().c_str());
    return refused ? 0 : 1;
  });
}
