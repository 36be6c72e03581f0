#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>

namespace dtensor {

// A vector whose first N elements live inside the object, so that the small shapes, cut lists and coordinates this
// library computes with never touch the heap. Grows to the heap beyond N. Moved-from is empty.
template <class T, std::size_t N>
class InlineVec {
 public:
  using value_type = T;
  using iterator = T*;
  using const_iterator = const T*;

  InlineVec() noexcept : data_(inline_data()) {}
  explicit InlineVec(std::size_t n, const T& value = T()) : InlineVec() { resize(n, value); }
  InlineVec(std::initializer_list<T> values) : InlineVec() { append(values.begin(), values.end()); }
  template <class It>
  InlineVec(It first, It last) : InlineVec() {
    append(first, last);
  }
  explicit InlineVec(std::span<const T> values) : InlineVec() { append(values.begin(), values.end()); }

  InlineVec(const InlineVec& other) : InlineVec() { append(other.begin(), other.end()); }
  InlineVec(InlineVec&& other) noexcept : InlineVec() { take(std::move(other)); }
  InlineVec& operator=(const InlineVec& other) {
    if (this != &other) {
      clear();
      append(other.begin(), other.end());
    }
    return *this;
  }
  InlineVec& operator=(InlineVec&& other) noexcept {
    if (this != &other) {
      release();
      take(std::move(other));
    }
    return *this;
  }
  ~InlineVec() { release(); }

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  T* data() noexcept { return data_; }
  const T* data() const noexcept { return data_; }
  T* begin() noexcept { return data_; }
  T* end() noexcept { return data_ + size_; }
  const T* begin() const noexcept { return data_; }
  const T* end() const noexcept { return data_ + size_; }
  T& operator[](std::size_t i) noexcept { return data_[i]; }
  const T& operator[](std::size_t i) const noexcept { return data_[i]; }
  T& front() noexcept { return data_[0]; }
  const T& front() const noexcept { return data_[0]; }
  T& back() noexcept { return data_[size_ - 1]; }
  const T& back() const noexcept { return data_[size_ - 1]; }
  operator std::span<const T>() const noexcept { return {data_, size_}; }

  void push_back(T value) {
    if (size_ == capacity_) grow(2 * capacity_ + 1);
    std::construct_at(data_ + size_, std::move(value));
    ++size_;
  }
  void pop_back() noexcept { std::destroy_at(data_ + --size_); }
  template <class It>
  void append(It first, It last) {
    for (; first != last; ++first) push_back(*first);
  }
  void resize(std::size_t n, const T& value = T()) {
    while (size_ > n) pop_back();
    if (n > capacity_) grow(n);
    for (; size_ < n; ++size_) std::construct_at(data_ + size_, value);
  }
  void clear() noexcept {
    std::destroy_n(data_, size_);
    size_ = 0;
  }
  void insert(std::size_t at, T value) {
    push_back(std::move(value));
    std::rotate(begin() + at, end() - 1, end());
  }
  void erase(std::size_t at) {
    std::move(begin() + at + 1, end(), begin() + at);
    pop_back();
  }

  friend bool operator==(const InlineVec& a, const InlineVec& b) {
    return a.size_ == b.size_ && std::equal(a.begin(), a.end(), b.begin());
  }

 private:
  T* inline_data() noexcept { return reinterpret_cast<T*>(storage_); }
  bool on_heap() const noexcept { return data_ != reinterpret_cast<const T*>(storage_); }

  void grow(std::size_t capacity) {
    T* fresh = std::allocator<T>().allocate(capacity);
    std::uninitialized_move_n(data_, size_, fresh);
    std::destroy_n(data_, size_);
    if (on_heap()) std::allocator<T>().deallocate(data_, capacity_);
    data_ = fresh;
    capacity_ = static_cast<std::uint32_t>(capacity);
  }
  void release() noexcept {
    clear();
    if (on_heap()) std::allocator<T>().deallocate(data_, capacity_);
    data_ = inline_data();
    capacity_ = N;
  }
  // Precondition: this is empty and inline.
  void take(InlineVec&& other) noexcept {
    if (other.on_heap()) {
      data_ = std::exchange(other.data_, other.inline_data());
      capacity_ = std::exchange(other.capacity_, static_cast<std::uint32_t>(N));
    } else {
      std::uninitialized_move_n(other.data_, other.size_, data_);
      std::destroy_n(other.data_, other.size_);
    }
    size_ = std::exchange(other.size_, 0);
  }

  T* data_;
  std::uint32_t size_ = 0;
  std::uint32_t capacity_ = N;
  alignas(T) unsigned char storage_[N * sizeof(T)];
};

// Sizes, strides, offsets and coordinates: int64, no heap up to 6 dims.
using Dims = InlineVec<std::int64_t, 6>;

}  // namespace dtensor
