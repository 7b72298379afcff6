//! UNSAFE: reads tensors through torch's stable C functions (`torch/csrc/inductor/aoti_torch/c/shim.h`), which take no
//! reference and no lock: a third of the time of a DLPack view, whose cast to a C++ tensor counts references up and down.
//! Where a tensor's Python object keeps its C++ tensor is not part of that interface: the place is found by looking, and
//! used only after tensors of every kind were read alike through it and by torch.
//! Invariant: a view is only made of a live `torch.Tensor`, while the interpreter is locked.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use pyo3::prelude::*;

use crate::python::prefetch::RecordAt;
use crate::tensor::{Device, Dtype, View};

/// `at::Tensor*`.
type Handle = *mut c_void;
type Get<T> = unsafe extern "C" fn(Handle, *mut T) -> c_int;

/// torch's functions, and what their codes mean.
pub struct Shim {
    data_ptr: Get<*mut c_void>,
    numel: Get<i64>,
    dim: Get<i64>,
    sizes: Get<*mut i64>,
    strides: Get<*mut i64>,
    dtype: Get<i32>,
    device_type: Get<i32>,
    device_index: Get<i32>,
    /// Since torch 2.9.
    layout: Option<Get<i32>>,
    strided: i32,
    cpu: i32,
    cuda: i32,
    dtypes: Vec<(i32, Dtype)>,
    tensor_at: RecordAt,
}

impl Shim {
    /// The functions of the process's torch, if it has them and they read `probes` as `views` have them. The probes are
    /// on the CPU; the first of each dtype tells its code.
    pub fn find(py: Python<'_>, probes: &[Bound<'_, PyAny>], views: &[View]) -> Option<Shim> {
        let ctypes = py.import("ctypes").ok()?;
        let file: String = py.import("torch").ok()?.getattr("__file__").ok()?.extract().ok()?;
        let library = std::path::Path::new(&file).with_file_name("lib").join("libtorch_cpu.so");
        let library = ctypes.call_method1("CDLL", (library,)).ok()?;
        let pointer_type = ctypes.getattr("c_void_p").ok()?;
        let address = |name: &str| -> Option<*const c_void> {
            let symbol = library.getattr(format!("aoti_torch_{name}")).ok()?;
            let address: usize =
                ctypes.call_method1("cast", (symbol, &pointer_type)).ok()?.getattr("value").ok()?.extract().ok()?;
            Some(address as *const c_void)
        };
        let constant = |name: &str| {
            // SAFETY: functions of these names take nothing and return an int32.
            Some(unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn() -> i32>(address(name)?)() })
        };
        let record = |probe: &Bound<'_, PyAny>| probe.getattr("_cdata").ok()?.extract::<u64>().ok();
        let first = probes.first()?;
        // SAFETY: functions of these names take a tensor and a pointer to a result of this type.
        let mut shim = unsafe {
            Shim {
                data_ptr: std::mem::transmute::<*const c_void, Get<*mut c_void>>(address("get_data_ptr")?),
                numel: std::mem::transmute::<*const c_void, Get<i64>>(address("get_numel")?),
                dim: std::mem::transmute::<*const c_void, Get<i64>>(address("get_dim")?),
                sizes: std::mem::transmute::<*const c_void, Get<*mut i64>>(address("get_sizes")?),
                strides: std::mem::transmute::<*const c_void, Get<*mut i64>>(address("get_strides")?),
                dtype: std::mem::transmute::<*const c_void, Get<i32>>(address("get_dtype")?),
                device_type: std::mem::transmute::<*const c_void, Get<i32>>(address("get_device_type")?),
                device_index: std::mem::transmute::<*const c_void, Get<i32>>(address("get_device_index")?),
                layout: address("get_layout").map(|at| std::mem::transmute::<*const c_void, Get<i32>>(at)),
                strided: constant("layout_strided")?,
                cpu: constant("device_type_cpu")?,
                cuda: constant("device_type_cuda")?,
                dtypes: Vec::new(),
                tensor_at: RecordAt::find(first.as_ptr() as u64, record(first)?)?,
            }
        };
        for (probe, view) in probes.iter().zip(views) {
            if shim.tensor_at.record(probe.as_ptr() as u64) != record(probe)? {
                return None;
            }
            // SAFETY: the probe is live, and its C++ tensor where that of the first was found.
            let code = unsafe { get(shim.dtype, shim.handle(probe))? };
            if shim.dtypes.iter().all(|&(known, _)| known != code) {
                shim.dtypes.push((code, view.dtype));
            }
        }
        let alike = |view: View, other: View| View { record: 0, ..view } == View { record: 0, ..other };
        let right =
            |(probe, view): (&Bound<'_, PyAny>, &View)| shim.view(probe).is_some_and(|found| alike(found, *view));
        probes.iter().zip(views).all(right).then_some(shim)
    }

    /// Where tensors' objects point at torch's records, which hold their C++ tensors.
    pub fn record_at(&self) -> RecordAt {
        self.tensor_at
    }

    fn handle(&self, tensor: &Bound<'_, PyAny>) -> Handle {
        (tensor.as_ptr() as u64 + self.tensor_at.offset()) as Handle
    }

    /// The view of a live tensor of plain elements; `None` where torch refuses, as for sparse tensors.
    pub fn view(&self, tensor: &Bound<'_, PyAny>) -> Option<View> {
        let handle = self.handle(tensor);
        // SAFETY: the tensor is live, its C++ tensor is at this place in every object of a subclass of torch.Tensor, and
        // shape and strides live as long as it. Other layouts than strided have no address; to ask for it is an
        // error that torch reports on stderr, so the layout comes first.
        unsafe {
            if let Some(layout) = self.layout
                && get(layout, handle)? != self.strided
            {
                return None;
            }
            let dim = get(self.dim, handle)? as usize;
            let slice = |function| -> Option<&[i64]> {
                let pointer: *mut i64 = get(function, handle)?;
                Some(if dim == 0 { &[] } else { std::slice::from_raw_parts(pointer, dim) })
            };
            let shape_at = get(self.sizes, handle)? as u64;
            let (shape, strides) = (slice(self.sizes)?, slice(self.strides)?);
            let code = get(self.dtype, handle)?;
            let dtype = self.dtypes.iter().find(|&&(known, _)| known == code).map_or(Dtype::Other, |&(_, dtype)| dtype);
            let device = match get(self.device_type, handle)? {
                cpu if cpu == self.cpu => Device::Cpu,
                cuda if cuda == self.cuda => Device::Cuda(get(self.device_index, handle)? as u16),
                _ => Device::Other,
            };
            let address = get(self.data_ptr, handle)? as u64;
            // A tensor without elements may have any address.
            let address = if get(self.numel, handle)? == 0 { 0 } else { address };
            Some(View { record: shape_at, ..View::new(address, shape, strides, dtype, device) })
        }
    }
}

/// Calls one of torch's functions; `None` if it reports an error.
///
/// # Safety
/// `handle` must be that of a live tensor.
unsafe fn get<T>(function: Get<T>, handle: Handle) -> Option<T> {
    let mut out = MaybeUninit::<T>::uninit();
    // SAFETY: the caller's promise; the result is a live local.
    let code = unsafe { function(handle, out.as_mut_ptr()) };
    // SAFETY: on success the function has written its result.
    (code == 0).then(|| unsafe { out.assume_init() })
}
