#include "methods/rate_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace aft {
namespace {

constexpr size_t kMaxBytes = 4096;
constexpr int64_t kMaxRate = 1'000'000'000;
// A process holds the lock for a measurement, a tenth of a second; one that was stopped must not stop the others.
constexpr auto kLockTimeout = std::chrono::seconds(2);
constexpr auto kLockPoll = std::chrono::milliseconds(2);

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// Returns the first lines of a file, which name everything that the rates depend on.
std::string header(const Products& products) {
  const MethodOrder usable = usable_methods();
  std::string methods;
  for (int i = 0; i < usable.count; ++i)
    methods += std::string(" ") + kMethods[static_cast<int>(usable.methods[i])].name;
  return std::string("aftexport method rates, format 1, million multiply-adds a second\nprocessor ") +
         processor_model() + "\nlibrary " AFT_VERSION "\ninstructions " + product_instruction_set() + "\nmethods" +
         methods + "\nproducts " + products.name() + "\n";
}

// FNV-1a: file names need no more than to differ.
std::string hash(const std::string& text) {
  uint64_t value = 0xcbf29ce484222325;
  for (unsigned char c : text) value = (value ^ c) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
  return digits;
}

// Returns the cache of aftexport/engines/tensorrt/engine_file.py: $AFTEXPORT_CACHE, $XDG_CACHE_HOME/aftexport or
// $HOME/.cache/aftexport. Without HOME, Python takes the home of the user database, and here no file is kept: to read the
// database, getpwuid_r() would load further libraries into the process.
std::string cache_folder() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (const std::string cache = variable("AFTEXPORT_CACHE"); !cache.empty()) return cache;
  if (const std::string cache = variable("XDG_CACHE_HOME"); !cache.empty()) return cache + "/aftexport";
  const std::string home = variable("HOME");
  return home.empty() ? "" : home + "/.cache/aftexport";
}

Descriptor open_folder(const std::string& folder) {
  return Descriptor(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

// Makes the folder of rates and those above it; empty where that fails.
std::string make_folder() {
  if (cache_folder().empty()) return "";
  const std::string folder = cache_folder() + "/methods";
  for (size_t end = folder.find('/', 1); end != std::string::npos; end = folder.find('/', end + 1))
    mkdir(folder.substr(0, end).c_str(), 0700);
  mkdir(folder.c_str(), 0700);
  return open_folder(folder).get() >= 0 ? folder : "";
}

std::optional<MethodRates> read_file(const Products& products, const std::string& path) {
  // A pipe of that name must not block, and the bound on the size holds for whatever is read. Both replace stat(), which
  // glibc has as a function only since 2.33.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) return std::nullopt;
  std::string text(kMaxBytes + 1, '\0');
  size_t size = 0;
  for (ssize_t count; size < text.size() && (count = read(file.get(), &text[size], text.size() - size)) > 0;)
    size += static_cast<size_t>(count);
  if (size > kMaxBytes) return std::nullopt;
  text.resize(size);
  return read_rate_text(products, text);
}

bool write_file(const std::string& path, const std::string& text) {
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  return file.get() >= 0 && write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

// The lock of a folder, for which the constructor waits until the process that measures releases it. After a wait of
// kLockTimeout it gives up, and so do all later ones of this process.
class Lock {
 public:
  explicit Lock(const std::string& folder) : folder_(open_folder(folder)) {
    static std::atomic<bool> timed_out{false};
    const auto end = std::chrono::steady_clock::now() + kLockTimeout;
    while (!(is_held_ = flock(folder_.get(), LOCK_EX | LOCK_NB) == 0) && errno == EWOULDBLOCK && !timed_out) {
      if (std::chrono::steady_clock::now() > end) timed_out = true;
      std::this_thread::sleep_for(kLockPoll);
    }
  }
  // Closing is not enough: a child that was forked meanwhile has the folder open too, and with it the lock.
  ~Lock() {
    if (is_held_) flock(folder_.get(), LOCK_UN);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  bool is_held() const { return is_held_; }

 private:
  Descriptor folder_;
  bool is_held_;
};

// The first to link a whole file wins. Only the holder of the lock replaces a file that cannot be read as one: another
// process may have just replaced it.
KeptRates publish(const Products& products, const std::string& path, const MethodRates& rates, const Lock& lock) {
  const std::string text = rate_text(products, rates);
  if (!read_rate_text(products, text)) return {rates, false};
  const auto unique = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::string temporary = path + "." + std::to_string(getpid()) + "." + std::to_string(unique);
  KeptRates kept{rates, false};
  if (write_file(temporary, text)) {
    kept.in_file = link(temporary.c_str(), path.c_str()) == 0;
    if (!kept.in_file) {
      if (const auto others = read_file(products, path))
        kept = {*others, true};
      else if (lock.is_held())
        kept.in_file = rename(temporary.c_str(), path.c_str()) == 0;
    }
  }
  unlink(temporary.c_str());
  return kept;
}

}  // namespace

std::string rate_text(const Products& products, const MethodRates& rates) {
  std::string text = header(products);
  const MethodOrder usable = usable_methods();
  for (int i = 0; i < usable.count; ++i) {
    const int index = static_cast<int>(usable.methods[i]);
    text += std::string(kMethods[index].name) + " " + std::to_string(rates.of[index]) + "\n";
  }
  return text + "end\n";
}

std::optional<MethodRates> read_rate_text(const Products& products, const std::string& text) {
  const std::string expected = header(products);
  if (text.compare(0, expected.size(), expected) != 0) return std::nullopt;
  MethodRates rates{};
  const char* at = text.c_str() + expected.size();
  const MethodOrder usable = usable_methods();
  for (int i = 0; i < usable.count; ++i) {
    const MethodFacts& facts = kMethods[static_cast<int>(usable.methods[i])];
    char name[16], newline;
    long long rate;
    int length = 0;
    if (std::sscanf(at, "%15[a-z0-9_] %10lld%c%n", name, &rate, &newline, &length) != 3 ||
        name != std::string(facts.name) || rate < 1 || rate > kMaxRate || newline != '\n')
      return std::nullopt;
    rates.of[static_cast<int>(facts.method)] = rate;
    at += length;
  }
  // Written again it must be the same text, to the last byte.
  if (text != rate_text(products, rates)) return std::nullopt;
  return rates;
}

KeptRates keep_rates(const Products& products, const std::function<MethodRates()>& measure) {
  const std::string folder = make_folder();
  if (folder.empty()) return {measure(), false};
  const std::string path =
      folder + "/" + product_instruction_set() + "-" + products.name() + "-" + hash(header(products));
  if (const auto rates = read_file(products, path)) return {*rates, true};
  const Lock lock(folder);
  if (const auto rates = read_file(products, path)) return {*rates, true};
  return publish(products, path, measure(), lock);
}

}  // namespace aft
