// Loops on torch's own threads, and scratch memory that each of them keeps.
#pragma once
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

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

// Grows, never shrinks; contents are undefined. Pieces begin at cache lines.
class Scratch {
 public:
  // One for each owner, so that two of them may be at work on one thread.
  template <class Owner>
  static Scratch& of_thread() {
    thread_local Scratch scratch;
    return scratch;
  }
  // Gives everything back for new use. There is one block then, of what was taken.
  void reset() {
    if (blocks_.size() != 1 || taken_ > size_) {
      blocks_.clear();
      add_block(taken_);
    }
    next_ = blocks_[0].get();
    left_ = size_;
    taken_ = 0;
  }
  template <class T>
  T* take(int64_t count) {
    const int64_t num_lines = (count * static_cast<int64_t>(sizeof(T)) + kLineBytes - 1) / kLineBytes;
    if (num_lines > left_) add_block(num_lines);
    Line* piece = next_;
    next_ += num_lines;
    left_ -= num_lines;
    taken_ += num_lines;
    return reinterpret_cast<T*>(piece);
  }

 private:
  static constexpr int64_t kLineBytes = 64;
  struct alignas(kLineBytes) Line {
    char bytes[kLineBytes];
  };
  void add_block(int64_t num_lines) {
    blocks_.emplace_back(new Line[static_cast<size_t>(num_lines)]);
    next_ = blocks_.back().get();
    size_ = left_ = num_lines;
  }

  std::vector<std::unique_ptr<Line[]>> blocks_;
  Line* next_ = nullptr;
  int64_t size_ = 0, left_ = 0, taken_ = 0;  // in lines; the size of the last block
};

}  // namespace v4flash
