//! UNSAFE: contexts, modules, copies and launches through the CUDA driver, found at run time. Knows nothing of Adam.
//! Invariant: everything runs in the primary context of its device, the one torch uses.

use std::ffi::{CString, c_void};

use anyhow::{Context, Result, bail};
use cudarc::driver::{result, sys};

/// A device and its primary context.
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    context: sys::CUcontext,
    /// Compute capability, 90 for sm_90.
    pub arch: i32,
    /// CUDA version of the driver, 13000 for 13.0.
    pub driver: i32,
}

// SAFETY: a context handle may be used from any thread.
unsafe impl Send for Gpu {}

/// A loaded kernel. Its module is never unloaded: captured graphs may hold it.
#[derive(Clone, Copy, Debug)]
pub struct Function(sys::CUfunction);

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Function {}

/// A mark in streams.
#[derive(Debug)]
pub struct Event(sys::CUevent);

// SAFETY: an event handle may be used from any thread.
unsafe impl Send for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle is live and dropped once; the driver keeps what streams still need of it.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// A stream of the caller's, as torch gives it.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub u64);

impl Gpu {
    /// The device of this ordinal; retains its primary context for the life of the process.
    pub fn new(ordinal: u16) -> Result<Gpu> {
        // SAFETY: loading the driver's library runs its initialisers, as torch did before.
        if !unsafe { sys::is_culib_present() } {
            bail!("the CUDA driver (libcuda) was not found");
        }
        result::init().context("CUDA did not start")?;
        let device = result::device::get(i32::from(ordinal)).context("no such CUDA device")?;
        let attribute = |attribute| {
            // SAFETY: the device handle came from the driver.
            unsafe { result::device::get_attribute(device, attribute) }.context("the device did not answer")
        };
        let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let mut driver = 0;
        // SAFETY: the pointer is to a live integer.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result().context("the driver did not tell its version")?;
        // SAFETY: the device handle came from the driver; the context is retained for good.
        let context = unsafe { result::primary_ctx::retain(device) }.context("the device's context did not start")?;
        Ok(Gpu { context, arch: 10 * major + minor, driver })
    }

    /// Loads machine code and finds kernels in it.
    pub fn load(&self, cubin: &[u8], names: &[&str]) -> Result<Vec<Function>> {
        self.within(|| {
            // SAFETY: NVRTC's machine code carries its own length; it is copied by the driver.
            let module =
                unsafe { result::module::load_data(cubin.as_ptr().cast()) }.context("the kernel did not load")?;
            let find = |name: &&str| {
                let name = CString::new(*name)?;
                // SAFETY: the module was just loaded and is never unloaded.
                unsafe { result::module::get_function(module, name) }.map(Function).context("the kernel was not found")
            };
            names.iter().map(find).collect()
        })
    }

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// `bytes` bytes at `address` must be valid on `stream` at that point.
    pub unsafe fn clear(&self, address: u64, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.within(|| unsafe {
            result::memset_d8_async(address, 0, bytes, stream.0 as sys::CUstream).context("memory was not cleared")
        })
    }

    /// Copies host memory to the device, in the stream's order.
    ///
    /// # Safety
    /// `bytes` bytes at `host` must stay valid and unchanged until the stream has passed this copy; those at `device`
    /// must be valid on `stream` at that point.
    pub unsafe fn copy_in(&self, device: u64, host: u64, bytes: usize, stream: Stream) -> Result<()> {
        self.within(|| {
            // SAFETY: the caller's promise.
            let host = unsafe { std::slice::from_raw_parts(host as *const u8, bytes) };
            // SAFETY: the caller's promise.
            unsafe { result::memcpy_htod_async(device, host, stream.0 as sys::CUstream) }
                .context("a copy to the device failed")
        })
    }

    /// Copies device memory to the host, in the stream's order.
    ///
    /// # Safety
    /// `bytes` bytes at `host` must stay valid and untouched until the stream has passed this copy; those at `device`
    /// must be valid on `stream` at that point.
    pub unsafe fn copy_out(&self, host: u64, device: u64, bytes: usize, stream: Stream) -> Result<()> {
        self.within(|| {
            // SAFETY: the caller's promise.
            unsafe { sys::cuMemcpyDtoHAsync_v2(host as *mut c_void, device, bytes, stream.0 as sys::CUstream) }
                .result()
                .context("a copy from the device failed")
        })
    }

    /// Whether host memory is page-locked, so that the device reads it while the host does other things.
    pub fn is_pinned(&self, host: u64) -> bool {
        let mut kind: u32 = 0;
        let mut attribute = [sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE];
        let mut out = [(&raw mut kind).cast::<c_void>()];
        let known = self.within(|| {
            // SAFETY: the driver looks the address up and does not follow it, and leaves 0 for memory it does not know;
            // the result is an unsigned int.
            let asked = unsafe { sys::cuPointerGetAttributes(1, attribute.as_mut_ptr(), out.as_mut_ptr(), host) };
            Ok(asked == sys::CUresult::CUDA_SUCCESS)
        });
        matches!(known, Ok(true)) && kind == sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32
    }

    /// A mark in streams, not yet made.
    pub fn event(&self) -> Result<Event> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        self.within(|| result::event::create(flags).context("no event could be made")).map(Event)
    }

    /// Marks how far a stream has come.
    pub fn mark(&self, event: &Event, stream: Stream) -> Result<()> {
        // SAFETY: both handles are live.
        self.within(|| unsafe { result::event::record(event.0, stream.0 as sys::CUstream) }.context("an event failed"))
    }

    /// Waits until a stream has come as far as it was when last marked; at once if it never was.
    pub fn wait(&self, event: &Event) -> Result<()> {
        // SAFETY: the handle is live.
        self.within(|| unsafe { result::event::synchronize(event.0) }.context("the device failed while copying"))
    }

    /// Waits for everything in a stream.
    pub fn finish(&self, stream: Stream) -> Result<()> {
        let stream = stream.0 as sys::CUstream;
        // SAFETY: the handle is torch's.
        self.within(|| unsafe { result::stream::synchronize(stream) }.context("the device failed while copying"))
    }

    /// Launches `blocks` blocks of `threads` threads with one parameter.
    ///
    /// # Safety
    /// `parameter` must be the kernel's parameter in full, and every address in it valid on `stream` at that point.
    pub unsafe fn launch(
        &self,
        function: Function,
        blocks: u32,
        threads: u32,
        stream: Stream,
        parameter: &[u64],
    ) -> Result<()> {
        self.within(|| {
            let mut parameters = [parameter.as_ptr().cast_mut().cast::<c_void>()];
            let stream = stream.0 as sys::CUstream;
            // SAFETY: the function is loaded, the driver copies the parameter before it returns, the rest is the
            // caller's promise.
            unsafe { result::launch_kernel(function.0, (blocks, 1, 1), (threads, 1, 1), 0, stream, &mut parameters) }
                .context("the launch of an Adam kernel failed")
        })
    }

    /// Runs `action` with this device's context current and puts back whatever was.
    fn within<T>(&self, action: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut previous = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle.
        unsafe { sys::cuCtxGetCurrent(&mut previous) }.result().context("CUDA has no state on this thread")?;
        if previous == self.context {
            return action();
        }
        // SAFETY: the context is retained for the life of the process.
        unsafe { sys::cuCtxSetCurrent(self.context) }
            .result()
            .context("the device's context could not be made current")?;
        let outcome = action();
        // SAFETY: the handle was current on this thread a moment ago.
        unsafe { sys::cuCtxSetCurrent(previous) }.result().context("the caller's context could not be put back")?;
        outcome
    }
}
