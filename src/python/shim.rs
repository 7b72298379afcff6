//! UNSAFE: reads tensors through torch's stable C functions (`torch/csrc/inductor/aoti_torch/c/shim.h`), which take no
//! reference and no lock: a third of the time of a DLPack view, whose cast to a C++ tensor counts references up and down.
//! Where a tensor's Python object keeps its C++ tensor is not part of that interface: the place is found by looking, and
//! used only after tensors of every kind were read alike through it and through DLPack.
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
    layout: Get<i32>,
    strided: i32,
    cpu: i32,
    cuda: i32,
    dtypes: Vec<(i32, Dtype)>,
    tensor_at: RecordAt,
}

impl Shim {
    /// The functions of the process's torch, if it has them and they read `probes` as `by_dlpack` does. The probes are
    /// on the CPU; the first of each dtype tells its code.
    pub fn find<'py>(
        py: Python<'py>,
        probes: &[Bound<'py, PyAny>],
        by_dlpack: impl Fn(&Bound<'py, PyAny>) -> PyResult<View>,
    ) -> Option<Shim> {
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
        let views = probes.iter().map(|probe| by_dlpack(probe).ok()).collect::<Option<Vec<View>>>()?;
        let (first, view) = (probes.first()?, views.first()?);
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
                layout: std::mem::transmute::<*const c_void, Get<i32>>(address("get_layout")?),
                strided: constant("layout_strided")?,
                cpu: constant("device_type_cpu")?,
                cuda: constant("device_type_cuda")?,
                dtypes: Vec::new(),
                tensor_at: RecordAt::find(first.as_ptr() as u64, view.record)?,
            }
        };
        for (probe, view) in probes.iter().zip(&views) {
            // SAFETY: the probe is live. Were its C++ tensor not where it was found for the first probe, the word there
            // would not point just before its shape.
            let code = unsafe {
                if !shim.tensor_at.is_right(probe.as_ptr() as u64, view.record) {
                    return None;
                }
                get(shim.dtype, shim.handle(probe))?
            };
            if shim.dtypes.iter().all(|&(known, _)| known != code) {
                shim.dtypes.push((code, view.dtype));
            }
        }
        let alike = probes.iter().zip(&views).all(|(probe, view)| shim.view(probe).as_ref() == Some(view));
        alike.then_some(shim)
    }

    fn handle(&self, tensor: &Bound<'_, PyAny>) -> Handle {
        (tensor.as_ptr() as u64 + self.tensor_at.offset()) as Handle
    }

    /// The view of a live tensor of plain elements; `None` where torch refuses, as for sparse tensors.
    pub fn view(&self, tensor: &Bound<'_, PyAny>) -> Option<View> {
        let handle = self.handle(tensor);
        // SAFETY: the tensor is live, its C++ tensor is at this place in every object of a subclass of torch.Tensor, and
        // shape and strides live as long as it. The strided layout is asked for first: others have no address.
        unsafe {
            if get(self.layout, handle)? != self.strided {
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
            // A tensor without elements may have no address.
            let address = if get(self.numel, handle)? == 0 { 0 } else { get(self.data_ptr, handle)? as u64 };
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
