// What torch asks a device for in C++: which one is current, its streams, and its events.
//
// torch's guard for backends in Python knows a single device, so that its autograd engine has no
// thread for a second one.

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>

namespace {

constexpr int MOST_DEVICES = 16;

int devices = 1;
std::atomic<int64_t> last_stream{0};
std::atomic<int64_t> counts[3];  // events recorded, waits of a stream for an event, and of the host
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
  void synchronizeStream(const c10::Stream&) const override { ++counts[2]; }
  void synchronizeDevice(const c10::DeviceIndex) const override { ++counts[2]; }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new c10::StreamId;
    *static_cast<c10::StreamId*>(*event) = stream.id();
    ++counts[0];
  }
  void block(void* event, const c10::Stream&) const override { if (event) ++counts[1]; }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { ++counts[2]; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<c10::StreamId*>(event);
  }
};

}  // namespace

extern "C" void register_devices(int count) {
  static Guard guard;
  devices = count;
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, &guard);
}

extern "C" int64_t counted(int what) { return counts[what]; }
