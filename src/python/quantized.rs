//! UNSAFE: Transformer Engine's quantized tensors, and the inside of its fp8 tensors: read by their attributes, or, where
//! that comes to the same, from the dicts of their objects, so that no code of Python's runs.
//! Invariant: what was found in a dict is borrowed; it lives until something changes that dict.

use std::ptr;

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi as c;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyString, PyTuple, PyType};

use crate::python::prefetch;
use crate::python::reader::{Reader, borrowed_values};
use crate::python::sweep::KnownClass;
use crate::tensor::Dtype;

/// Transformer Engine's objects, looked up once per process.
struct Engine {
    /// All quantized tensors.
    quantized: Py<PyType>,
    /// fp8 tensors with one scale, and the quantizer of those whose scale is given from outside.
    fp8: Py<PyType>,
    delayed: Py<PyType>,
    e4m3: Py<PyAny>,
    e5m2: Py<PyAny>,
}

impl Engine {
    fn get(py: Python<'_>) -> PyResult<&'static Engine> {
        static ENGINE: PyOnceLock<Engine> = PyOnceLock::new();
        // SAFETY of the lifetime: a static is never dropped.
        ENGINE.get_or_try_init(py, || {
            let module = py.import("transformer_engine.pytorch.tensor.float8_tensor")?;
            let class = |name| PyResult::Ok(module.getattr(name)?.cast_into::<PyType>()?.unbind());
            let dtypes = py.import("te_patches._releases")?.call_method0("fp8_dtypes")?;
            Ok(Engine {
                quantized: class("QuantizedTensor")?,
                fp8: class("Float8Tensor")?,
                delayed: class("Float8Quantizer")?,
                e4m3: dtypes.getattr("kFloat8E4M3")?.unbind(),
                e5m2: dtypes.getattr("kFloat8E5M2")?.unbind(),
            })
        })
    }

    /// Our name of a member of Transformer Engine's enum of dtypes.
    fn dtype(&self, member: &Bound<'_, PyAny>) -> PyResult<Dtype> {
        if member.is(&self.e4m3) {
            return Ok(Dtype::E4M3);
        }
        if member.is(&self.e5m2) {
            return Ok(Dtype::E5M2);
        }
        // The compiled enum makes another object of a member each time that it hands one out.
        Ok(match member.getattr("name")?.extract::<String>()?.as_str() {
            "kFloat8E4M3" => Dtype::E4M3,
            "kFloat8E5M2" => Dtype::E5M2,
            _ => Dtype::Other,
        })
    }
}

/// The inside of a Float8Tensor.
pub struct Fp8<'py> {
    /// uint8, of the tensor's shape.
    pub data: Bound<'py, PyAny>,
    pub dtype: Dtype,
    /// The quantizer's, one fp32 element each.
    pub scale: Bound<'py, PyAny>,
    pub scale_inv: Bound<'py, PyAny>,
    pub amax: Bound<'py, PyAny>,
    /// Whether the quantizer's scale is given from outside rather than found at each quantization.
    pub delayed: bool,
    /// Whether a transposed copy of the data is kept and counts as one.
    pub transposed: bool,
    /// The tensor's and the quantizer's object, each with its dict if it has one, for hints to the processor.
    pub dicts: [Option<[u64; 2]>; 2],
}

impl<'py> Reader<'py> {
    /// Whether a tensor is one of Transformer Engine's quantized tensors.
    pub fn is_quantized(&self, tensor: &Bound<'py, PyAny>) -> PyResult<bool> {
        let py = tensor.py();
        tensor.is_instance(Engine::get(py)?.quantized.bind(py))
    }

    /// The inside of a tensor if it is a Float8Tensor. RuntimeError if it has lost its quantizer.
    pub fn fp8(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<Fp8<'py>>> {
        let py = tensor.py();
        let engine = Engine::get(py)?;
        if !is_of(tensor, engine.fp8.bind(py))? {
            return Ok(None);
        }
        let quantizer = tensor.getattr(intern!(py, "_quantizer"))?;
        if quantizer.is_none() {
            return Err(PyRuntimeError::new_err("FP8 quantizer data is not initialized."));
        }
        let dtype = engine.dtype(&tensor.getattr(intern!(py, "_fp8_dtype"))?)?;
        let delayed = is_of(&quantizer, engine.delayed.bind(py))?;
        if !delayed && !quantizer.hasattr(intern!(py, "scale"))? {
            return Ok(None);
        }
        let dict = |object: &Bound<'py, PyAny>| {
            let object = object.as_ptr() as u64;
            // SAFETY: the object is live.
            unsafe { own_dict(object) }.map(|dict| [object, dict])
        };
        Ok(Some(Fp8 {
            data: tensor.getattr(intern!(py, "_data"))?,
            dtype,
            scale: quantizer.getattr(intern!(py, "scale"))?,
            scale_inv: tensor.getattr(intern!(py, "_scale_inv"))?,
            amax: quantizer.getattr(intern!(py, "amax"))?,
            delayed,
            transposed: !tensor.getattr(intern!(py, "_transpose"))?.is_none()
                && !tensor.getattr(intern!(py, "_transpose_invalid"))?.is_truthy()?,
            dicts: [dict(tensor), dict(&quantizer)],
        }))
    }

    /// The way to the insides of fp8 tensors; `None` if their classes have ways of their own to attributes.
    pub fn insides(&self, py: Python<'py>) -> PyResult<Option<Insides<'py>>> {
        let engine = Engine::get(py)?;
        let of_tensor = ["_data", "_scale_inv", "_fp8_dtype", "_transpose", "_transpose_invalid", "_quantizer"];
        let of_quantizer = ["scale", "amax"];
        let (tensor, quantizer) = (engine.fp8.bind(py), engine.delayed.bind(py));
        if !from_dict(tensor, &of_tensor)? || !from_dict(quantizer, &of_quantizer)? {
            return Ok(None);
        }
        let key = |name| PyString::intern(py, name);
        Ok(Some(Insides {
            tensor: tensor.as_ptr() as u64,
            quantizer: quantizer.as_ptr() as u64,
            dtypes: [(&engine.e4m3, Dtype::E4M3), (&engine.e5m2, Dtype::E5M2)]
                .map(|(member, dtype)| (member.as_ptr() as u64, dtype)),
            none: py.None().as_ptr() as u64,
            yes: PyBool::new(py, true).as_ptr() as u64,
            classes: self.known_classes(),
            of_tensor: of_tensor.map(key),
            of_quantizer: of_quantizer.map(key),
            collector: Collector::stop(),
        }))
    }
}

/// Whether each attribute of these names is that of the object's own dict.
fn from_dict(class: &Bound<'_, PyType>, names: &[&str]) -> PyResult<bool> {
    let py = class.py();
    let plain = py.import("builtins")?.getattr("object")?.getattr(intern!(py, "__getattribute__"))?;
    if !class.getattr(intern!(py, "__getattribute__"))?.is(&plain) {
        return Ok(false);
    }
    for base in class.getattr(intern!(py, "__mro__"))?.cast::<PyTuple>()?.iter() {
        let dict = base.getattr(intern!(py, "__dict__"))?;
        for name in names {
            if dict.contains(name)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// The way to the insides of fp8 tensors of Transformer Engine's own classes. While it lives no garbage is collected, so that
/// making a dict runs no code of Python's.
pub struct Insides<'py> {
    /// Addresses of the classes, of the dtypes, of None and of True.
    tensor: u64,
    quantizer: u64,
    dtypes: [(u64, Dtype); 2],
    none: u64,
    yes: u64,
    /// The way through DTensors.
    classes: Vec<KnownClass>,
    of_tensor: [Bound<'py, PyString>; 6],
    of_quantizer: [Bound<'py, PyString>; 2],
    #[expect(dead_code, reason = "held for its end")]
    collector: Collector,
}

/// The objects inside an fp8 tensor, borrowed.
pub struct Inside {
    pub data: u64,
    pub scale: u64,
    pub scale_inv: u64,
    pub amax: u64,
    pub dtype: Dtype,
    /// Whether a transposed copy of the data may count as one.
    pub transposed: bool,
    /// The tensor's and the quantizer's object, each with its dict.
    pub dicts: [[u64; 2]; 2],
}

impl Insides<'_> {
    /// The inside of a tensor, or of the local tensor of one that is a DTensor; `None` if it is anything but an fp8 tensor
    /// whose quantizer's scale is given from outside.
    ///
    /// # Safety
    /// `object` must be a live Python object.
    pub unsafe fn of(&self, object: u64, sharded: bool) -> Option<Inside> {
        let tensor = if sharded {
            let class = prefetch::class(object);
            let slot = self.classes.iter().find(|known| known.class == class)?.slot?;
            // SAFETY: objects of this class have this word, which is 0 or a live object.
            unsafe { prefetch::read(object + slot) }
        } else {
            object
        };
        if tensor == 0 || prefetch::class(tensor) != self.tensor {
            return None;
        }
        // SAFETY: the tensor is live, by the caller's promise; so is its dict, what that holds, and so on.
        unsafe {
            let dict = own_dict(tensor)?;
            let [data, scale_inv, dtype, transpose, outdated, quantizer] = borrowed_values(dict, &self.of_tensor);
            let quantizer = quantizer.filter(|&quantizer| prefetch::class(quantizer) == self.quantizer)?;
            let (dtype, transposed) = (dtype?, transpose? != self.none && outdated? != self.yes);
            let &(_, dtype) = self.dtypes.iter().find(|&&(member, _)| member == dtype)?;
            let dicts = [[tensor, dict], [quantizer, own_dict(quantizer)?]];
            let [scale, amax] = borrowed_values(dicts[1][1], &self.of_quantizer);
            let (data, scale, scale_inv, amax) = (data?, scale?, scale_inv?, amax?);
            Some(Inside { data, scale, scale_inv, amax, dtype, transposed, dicts })
        }
    }
}

/// The dict of an object's own attributes, which the object keeps alive.
///
/// # Safety
/// `object` must be a live Python object.
unsafe fn own_dict(object: u64) -> Option<u64> {
    // SAFETY: the object is live; the reference that is given back is one of two.
    unsafe {
        let dict = c::PyObject_GenericGetDict(object as *mut c::PyObject, ptr::null_mut());
        if dict.is_null() {
            c::PyErr_Clear();
            return None;
        }
        c::Py_DECREF(dict);
        Some(dict as u64)
    }
}

/// Python's collector of garbage, stopped until this is dropped.
struct Collector {
    ran: bool,
}

impl Collector {
    fn stop() -> Collector {
        // SAFETY: the interpreter's lock is held wherever a `Reader` is.
        Collector { ran: unsafe { c::PyGC_Disable() } != 0 }
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        if self.ran {
            // SAFETY: as in `stop`.
            unsafe { c::PyGC_Enable() };
        }
    }
}

/// Whether an object is an instance of a class, which most are of the class itself.
fn is_of(object: &Bound<'_, PyAny>, class: &Bound<'_, PyType>) -> PyResult<bool> {
    Ok(object.get_type().is(class) || object.is_instance(class)?)
}
