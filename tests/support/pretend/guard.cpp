// What torch asks a device for in C++: which one is current, its streams, its events, pinned memory.
//
// torch's guard for backends in Python knows a single device, so that its autograd engine has no
// thread for a second one, and its hooks have no pinned memory. What streams and the host wait for
// is told to Python, see pretend_streams.py.

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>

namespace {

constexpr int MOST_DEVICES = 16;

int devices = 1;
std::atomic<int64_t> last_stream{0};
enum What { RECORD, BLOCK, WAIT_FOR_EVENT, WAIT_FOR_STREAM, WAIT_FOR_DEVICE, DESTROY };
using Told = void (*)(int what, int64_t event, int device, int64_t stream);
Told told = nullptr;
using Asked = bool (*)(int64_t event);
Asked asked = nullptr;
pid_t user = 0;  // the process that first used a device
thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, MOST_DEVICES> streams{};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }

  c10::Device getDevice() const override { return c10::Device(type(), current); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < devices, "there is no ", device, ", only ", devices, " devices");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream stream(c10::Device device, c10::StreamId id) const {
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
  c10::Device whole(c10::Device device) const { return device.has_index() ? device : getDevice(); }
  c10::Stream getStream(c10::Device device) const override {
    return stream(whole(device), streams[whole(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(whole(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(whole(device), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    streams[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    told(WAIT_FOR_STREAM, 0, stream.device_index(), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    told(WAIT_FOR_DEVICE, 0, device, 0);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new char;  // whose address names it
    told(RECORD, reinterpret_cast<int64_t>(*event), stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) told(BLOCK, reinterpret_cast<int64_t>(event), stream.device_index(), stream.id());
  }
  bool queryEvent(void* event) const override {
    return !event || asked(reinterpret_cast<int64_t>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) told(WAIT_FOR_EVENT, reinterpret_cast<int64_t>(event), 0, 0);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event) told(DESTROY, reinterpret_cast<int64_t>(event), 0, 0);
    delete static_cast<char*>(event);
  }
};

std::mutex pinning;
std::map<const char*, size_t> pinned;  // sizes, by address

void unpin(void* address) {
  std::lock_guard<std::mutex> lock(pinning);
  pinned.erase(static_cast<char*>(address));
  c10::free_cpu(address);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto address = size ? c10::alloc_cpu(size) : nullptr;
    std::lock_guard<std::mutex> lock(pinning);
    if (size) pinned[static_cast<char*>(address)] = size;
    return {address, address, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return user == getpid(); }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinning);
    auto address = static_cast<const char*>(data);
    auto after = pinned.upper_bound(address);
    if (after == pinned.begin()) return false;
    auto [start, size] = *--after;
    return address < start + size;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static Pinned allocator;
    return &allocator;
  }
};

}  // namespace

extern "C" void register_devices(int count, Told tell, Asked ask) {
  static Guard guard;
  static Hooks hooks;
  devices = count;
  told = tell;
  asked = ask;
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, &guard);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

extern "C" void use_devices() { user = getpid(); }

extern "C" int64_t current_stream(int device) { return streams[device]; }
