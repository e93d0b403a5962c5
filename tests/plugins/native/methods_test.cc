// The file of measured rates, for the sanitizers: a text is read only if it is whole, and threads that write the same
// file agree. test_methods.py has the same with processes, and the rule of the choice.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
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
    expect(!aft::read_rate_text(kProducts, text.substr(0, size)),
           "a text of " + std::to_string(size) + " bytes is read");
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
  std::set<int> indices{aft::kAftFullProducts.index()};
  for (int64_t width = 16; width <= 1024; width *= 2) indices.insert(aft::encoder_products(width).index());
  expect(static_cast<int>(indices.size()) == aft::kProductsCount && *indices.begin() == 0 &&
             *indices.rbegin() == aft::kProductsCount - 1,
         "the products have other indices than 0 to kProductsCount - 1");
}

// A folder for the cache of this process.
class Cache {
 public:
  Cache() {
    expect(mkdtemp(folder_), "no temporary folder");
    setenv("AFTEXPORT_CACHE", folder_, 1);
  }
  ~Cache() { expect(std::system((std::string("rm -r ") + folder_).c_str()) == 0, "the temporary folder stays"); }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // Returns a descriptor that has the lock; negative if another has it.
  int lock() const {
    const int fd = open((std::string(folder_) + "/methods").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    close(fd);
    return -1;
  }

 private:
  char folder_[32] = "/tmp/aft_methods_XXXXXX";
};

void check_file() {
  const Cache cache;
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
}

void check_unreadable_rates() {
  const Cache cache;
  for (int64_t rate : {int64_t{0}, int64_t{1} << 40}) {
    aft::MethodRates rates = some_rates(1);
    rates.of[0] = rate;
    expect(!aft::keep_rates(kProducts, [&] { return rates; }).in_file, "a file with a rate out of range is written");
  }
  const auto kept = aft::keep_rates(kProducts, [] { return some_rates(1); });
  expect(kept.in_file && kept.rates.of[0] == some_rates(1).of[0], "rates out of range are kept");
}

// A child that is forked during a measurement has the locked folder open for as long as it lives.
void check_fork() {
  const Cache cache;
  int until[2];
  expect(pipe(until) == 0, "no pipe");
  pid_t child = -1;
  aft::keep_rates(kProducts, [&] {
    child = fork();
    if (child == 0) {
      char end;
      close(until[1]);
      _exit(read(until[0], &end, 1) == 0 ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    return some_rates(1);
  });
  const int lock = cache.lock();
  expect(lock >= 0, "a child keeps the lock");
  close(lock);
  close(until[0]);
  close(until[1]);
  int status;
  expect(waitpid(child, &status, 0) == child && status == 0, "the child fails");
}

// Another process that keeps the lock costs one wait in total, and its file is not replaced.
void check_held_lock() {
  const Cache cache;
  expect(aft::keep_rates(kProducts, [] { return some_rates(1); }).in_file, "the rates are in no file");
  const int lock = cache.lock();
  const auto start = std::chrono::steady_clock::now();
  for (int64_t width : {16, 32, 128, 256, 512})
    expect(aft::keep_rates({width}, [] { return some_rates(1); }).in_file, "a new file needs no lock");
  const auto waited = std::chrono::steady_clock::now() - start;
  expect(waited > std::chrono::seconds(1), "the lock is not waited for");
  expect(waited < std::chrono::seconds(4), "the lock is waited for more than once");
  close(lock);
}

}  // namespace

int main() {
  if (instructions_missing()) return kSkipped;
  check_text();
  check_widths();
  check_file();
  check_unreadable_rates();
  check_fork();
  check_held_lock();  // the last: this process waits for no other lock
  std::printf("%s, %d failures\n", aft::product_instruction_set(), failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
