#define EMULATOR_RECORDS
#include "access_counts.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "emulator.h"
#include "memory.h"
#include "threads.h"

namespace emulator {
namespace {

constexpr unsigned kLanes = 32, kBanks = 32, kBankBytes = 4, kSectorBytes = 32;

struct Access {
  int lane;
  uintptr_t address;
  size_t bytes;
};

bool is_unrecorded;
void (*report_to)(const AccessCounts&);
AccessCounts counts;

template <class T>
int64_t count_distinct(std::vector<T>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  return static_cast<int64_t>(values.size());
}

// The units of `size` bytes that the accesses touch.
int64_t count_units(const Access* accesses, size_t count, size_t size, std::vector<uintptr_t>* kept = nullptr) {
  std::vector<uintptr_t> units;
  for (size_t i = 0; i < count; ++i)
    for (uintptr_t unit = accesses[i].address / size; unit <= (accesses[i].address + accesses[i].bytes - 1) / size; ++unit)
      units.push_back(unit);
  const int64_t distinct = count_distinct(units);
  if (kept) *kept = std::move(units);
  return distinct;
}

int64_t round_up_quotient(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lanes that move 8 or 16 bytes are served 16 or 8 at a time.
void add_shared(const std::vector<Access>& accesses) {
  const size_t at_once = kBanks * kBankBytes / std::max<size_t>(accesses[0].bytes, kBankBytes);
  for (size_t first = 0; first < accesses.size(); first += at_once) {
    std::vector<uintptr_t> words;
    count_units(&accesses[first], std::min(at_once, accesses.size() - first), kBankBytes, &words);
    int64_t of_bank[kBanks] = {};
    for (uintptr_t word : words) ++of_bank[word % kBanks];
    counts.passes += *std::max_element(of_bank, of_bank + kBanks);
  }
  counts.fewest_passes += round_up_quotient(count_units(accesses.data(), accesses.size(), kBankBytes), kBanks);
}

void add_global(const std::vector<Access>& accesses) {
  counts.sectors += count_units(accesses.data(), accesses.size(), kSectorBytes);
  counts.fewest_sectors += round_up_quotient(count_units(accesses.data(), accesses.size(), 1), kSectorBytes);
}

}  // namespace

// Of a warp: the accesses of each instruction since its lanes last met, by place and turn.
struct AccessLog {
  std::map<std::pair<const void*, unsigned>, std::vector<Access>> instructions;
  std::map<const void*, unsigned> turns[kLanes];
  unsigned lanes_met = 0;
};

AccessLog* create_access_log() { return new AccessLog; }

void count_accesses(void (*report)(const AccessCounts&)) { report_to = report; }

Unrecorded::Unrecorded() { is_unrecorded = true; }
Unrecorded::~Unrecorded() { is_unrecorded = false; }

void record_access(const void* place, const void* address, size_t bytes) {
  if (!report_to) return;
  AccessLog* const log = log_of_running_warp();
  if (!log || (!is_shared(address, bytes) && !is_device_memory(address))) return;
  const unsigned turn = log->turns[lane()][place]++;
  log->instructions[{place, turn}].push_back({lane(), reinterpret_cast<uintptr_t>(address), bytes});
}

void record_instrumented_access(const void* place, const void* address, size_t bytes) {
  if (!is_unrecorded) record_access(place, address, bytes);
}

void lane_meets_others(AccessLog& log) {
  if (!report_to || ++log.lanes_met < kLanes) return;
  for (auto& [instruction, accesses] : log.instructions) {
    std::sort(accesses.begin(), accesses.end(), [](const Access& a, const Access& b) { return a.lane < b.lane; });
    const void* first = reinterpret_cast<const void*>(accesses[0].address);
    is_device_memory(first) ? add_global(accesses) : add_shared(accesses);
  }
  log.instructions.clear();
  for (auto& turns : log.turns) turns.clear();
  log.lanes_met = 0;
}

void begin_counting(const void* kernel) {
  counts = {};
  counts.kernel = kernel;
}

void end_counting() {
  if (report_to) report_to(counts);
}

}  // namespace emulator
