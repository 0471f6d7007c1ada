// CUDA without a device, for CPU builds of torch: a device guard, and hooks with a pinned allocator and generators.
// guarded_processes.py compiles this file. Load the result by LD_PRELOAD, so that torch finds the hooks when it starts.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <mutex>
#include <unordered_set>

namespace c10::impl {

struct PretendedGuard final : DeviceGuardImplInterface {
  PretendedGuard() = default;
  static Device only() { return Device(DeviceType::CUDA, 0); }
  static Stream its_stream() { return Stream(Stream::DEFAULT, only()); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return its_stream(); }
  Stream getNewStream(Device, int) const override { return its_stream(); }
  Stream getDefaultStream(Device) const override { return its_stream(); }
  Stream exchangeStream(Stream) const noexcept override { return its_stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, PretendedGuard)

}  // namespace c10::impl

namespace {

std::mutex pinned_lock;
std::unordered_set<const void*> pinned;

void free_pinned(void* memory) {
  {
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.erase(memory);
  }
  c10::GetCPUAllocator()->raw_deallocate(memory);
}

// Main memory that remembers that it is pinned.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.insert(memory);
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

PinnedAllocator pinned_allocator;

// A generator on cuda:0 with the state of the CPU's generator. A GPU's own generator draws other numbers.
struct PretendedGenerator final : at::CPUGeneratorImpl {
  PretendedGenerator() {
    device_ = c10::Device(c10::DeviceType::CUDA, 0);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

}  // namespace

struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard<std::mutex> held(pinned_lock);
    return pinned.count(memory) > 0;
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<PretendedGenerator>();
  }
};

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
