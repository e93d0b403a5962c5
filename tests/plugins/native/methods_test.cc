// The file of measured rates, for the sanitizers: a text is read only if it is whole, and threads that write the same
// file agree. test_methods.py has the same with processes, and the rule of the choice.

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "methods/rate_file.h"
#include "support.h"

namespace {

constexpr aft::Products kProducts{64};

aft::MethodRates some_rates(int64_t first) {
  aft::MethodRates rates{};
  for (aft::Method method : usable_methods()) rates.of[static_cast<int>(method)] = first++;
  return rates;
}

void check_text() {
  const std::string text = aft::rate_text(kProducts, some_rates(123456));
  const auto read = aft::read_rate_text(kProducts, text);
  expect(read && aft::rate_text(kProducts, *read) == text, "a text is not read as it was written");
  expect(!aft::read_rate_text({128}, text), "the rates of other products are read");
  for (size_t size = 0; size < text.size(); ++size)
    expect(!aft::read_rate_text(kProducts, text.substr(0, size)), "a text of " + std::to_string(size) + " bytes is read");
  for (size_t at = 0; at < text.size(); ++at)
    for (const char* other : {" ", "\n", "-", "x", "\x80"}) {
      std::string damaged = text;
      if (damaged[at] == *other) continue;
      damaged[at] = *other;
      expect(!aft::read_rate_text(kProducts, damaged), "byte " + std::to_string(at) + " may be " + other);
    }
}

void check_widths() {
  const int64_t classes[][2] = {{1, 16}, {22, 16}, {23, 32}, {181, 128}, {182, 256}, {256, 256}, {5000, 1024}};
  for (const auto& [width, power] : classes)
    expect(aft::encoder_products(width).width == power, "the class of width " + std::to_string(width));
}

void check_file() {
  char folder[] = "/tmp/aft_methods_XXXXXX";
  expect(mkdtemp(folder), "no temporary folder");
  setenv("AFTEXPORT_CACHE", folder, 1);
  std::vector<std::string> kept(8);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kept.size(); ++i)
    threads.emplace_back([&, i] {
      const auto rates = aft::keep_rates(kProducts, [&] { return some_rates(1000 * static_cast<int64_t>(i + 1)); });
      expect(rates.in_file, "the rates are in no file");
      kept[i] = aft::rate_text(kProducts, rates.rates);
    });
  for (std::thread& thread : threads) thread.join();
  expect(std::set<std::string>(kept.begin(), kept.end()).size() == 1, "threads have different rates");
  const auto again = aft::keep_rates(kProducts, [] { return some_rates(1); });
  expect(aft::rate_text(kProducts, again.rates) == kept[0], "kept rates are measured again");
  setenv("AFTEXPORT_CACHE", "/dev/null/none", 1);
  expect(!aft::keep_rates(kProducts, [] { return some_rates(1); }).in_file, "a file is where none can be");
  expect(std::system((std::string("rm -r ") + folder).c_str()) == 0, "the temporary folder stays");
}

}  // namespace

int main() {
  if (instructions_missing()) return kSkipped;
  check_text();
  check_widths();
  check_file();
  std::printf("%s, %d failures\n", aft::product_instruction_set(), failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
