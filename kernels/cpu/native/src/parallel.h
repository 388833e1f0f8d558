// Loops on torch's own threads, and scratch memory that each of them keeps.
#pragma once
#include <ATen/Parallel.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace v4flash {

// Rows of this many elements in all are not worth a second thread.
constexpr int64_t kElementsPerThread = 8192;

// f(first row, last row), rows of `width` elements; small work stays on the calling thread.
template <class F>
inline void for_rows(int64_t num_rows, int64_t width, F f) {
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, width));
  at::parallel_for(0, num_rows, grain, f);
}

// Calls worker(each_task) on every thread; each_task(f) there calls f(index, the index of this thread's next task or
// num_tasks). Tasks are handed out one by one, in order.
template <class Worker>
inline void for_workers(int64_t num_tasks, Worker worker) {
  std::atomic<int64_t> counter{0};
  const int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_tasks);
  at::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; ++begin) {
      worker([&](auto f) {
        int64_t task = std::min(counter.fetch_add(1), num_tasks);
        while (task < num_tasks) {
          const int64_t next = std::min(counter.fetch_add(1), num_tasks);
          f(task, next);
          task = next;
        }
      });
    }
  });
}

// Grows, never shrinks; contents are undefined. Pieces are aligned to a cache line.
class Scratch {
 public:
  // One for each owner, so that two of them may be at work on one thread.
  template <class Owner>
  static Scratch& of_thread() {
    thread_local Scratch scratch;
    return scratch;
  }
  // Makes room for `bytes` in all and gives everything back for new use.
  void reset(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(new char[static_cast<size_t>(bytes + kAlign)]);
      size_ = bytes;
    }
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    next_ = memory_.get() + (kAlign - address % kAlign) % kAlign;
  }
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(next_);
    next_ += padded<T>(count);
    return piece;
  }
  template <class T>
  static int64_t padded(int64_t count) {
    return (count * static_cast<int64_t>(sizeof(T)) + kAlign - 1) / kAlign * kAlign;
  }

 private:
  static constexpr int64_t kAlign = 64;
  std::unique_ptr<char[]> memory_;
  int64_t size_ = 0;
  char* next_ = nullptr;
};

}  // namespace v4flash
