// CUDA devices that do nothing, for a build of torch without CUDA: what autograd and pinned memory ask of a device, so
// that fake tensors can live there. No kernel exists: only tensors without memory go through it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace {

constexpr c10::DeviceIndex NUM_DEVICES = 8;
thread_local c10::DeviceIndex current = 0;  // as with CUDA, each thread begins with the first

c10::DeviceIndex chosen(c10::DeviceIndex index) { return index < 0 ? current : index; }

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return {type(), current}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { current = chosen(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }

  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {type(), chosen(device.index())});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(getDevice()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

// Ordinary memory that is known to have been asked for as pinned.
struct PinnedMemory final : c10::Allocator {
  static inline std::mutex mutex;
  static inline std::unordered_set<const void*> pinned;

  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      pinned.erase(memory);
    }
    std::free(memory);
  }
  c10::DataPtr allocate(size_t size) override {
    void* memory = std::malloc(size);
    std::lock_guard<std::mutex> lock(mutex);
    pinned.insert(memory);
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

PinnedMemory pinned_memory;

struct FakeHooks final : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return NUM_DEVICES; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(PinnedMemory::mutex);
    return PinnedMemory::pinned.count(data) > 0;
  }
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard);
}
namespace at {
using CUDAHooks = FakeHooks;  // torch looks it up by this name
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
