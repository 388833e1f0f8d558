// Memory that will be read soon, fetched line by line in the order of its addresses: so the CPU sees a stream and runs
// ahead of it by itself.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

namespace v4flash {

class Coming {
 public:
  struct Run {
    const char *begin, *end;
  };

  // With room for so many runs.
  explicit Coming(Run* runs) : runs_(runs) {}

  void clear() { num_runs_ = next_ = num_lines_ = 0; }
  void add(const void* begin, int64_t num_bytes) {
    const char* from = static_cast<const char*>(begin);
    num_lines_ += num_bytes / kLineBytes + 1;
    if (num_runs_ > 0 && runs_[num_runs_ - 1].end == from) runs_[num_runs_ - 1].end += num_bytes;
    else runs_[num_runs_++] = {from, from + num_bytes};
  }
  // Lines to fetch at each of so many calls.
  void divide(int64_t num_calls) { at_once_ = (num_lines_ + num_calls - 1) / num_calls; }
  void fetch() {
    for (int64_t left = at_once_; left > 0 && next_ < num_runs_;) {
      Run& run = runs_[next_];
      const char* end = std::min(run.end, run.begin + left * kLineBytes);
      for (const char* line = run.begin; line < end; line += kLineBytes, --left) _mm_prefetch(line, _MM_HINT_T0);
      run.begin = end;
      next_ += end == run.end;
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  Run* runs_;
  int64_t num_runs_ = 0, next_ = 0, num_lines_ = 0, at_once_ = 0;
};

}  // namespace v4flash
