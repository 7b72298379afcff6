//! Faults as the exceptions that torch or Transformer Engine would raise, naming the parameter and the remedy.

use pyo3::exceptions::{PyAssertionError, PyRuntimeError};
use pyo3::prelude::*;

use crate::plan::column::{Fault, Role};
use crate::tensor::Dtype;

/// Where a parameter stands in its optimizer.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Index of the group.
    pub group: usize,
    /// Index of the parameter in the group.
    pub index: usize,
}

/// "parameter 3 of group 0 (shape [4, 8], torch.bfloat16, cuda:0)".
pub fn name(place: Place, param: &Bound<'_, PyAny>) -> String {
    format!("parameter {} of group {} ({})", place.index, place.group, describe(param))
}

/// "shape [4, 8], torch.bfloat16, cuda:0".
pub fn describe(tensor: &Bound<'_, PyAny>) -> String {
    let attribute = |name| tensor.getattr(name).map_or_else(|_| format!("no {name}"), |value| value.to_string());
    let shape = attribute("shape").replace("torch.Size(", "").replace(')', "");
    format!("shape {shape}, {}, {}", attribute("dtype"), attribute("device"))
}

/// The exception for a fault; `tensor` is the tensor at fault.
pub fn raise(fault: Fault, place: Place, param: &Bound<'_, PyAny>, tensor: &Bound<'_, PyAny>) -> PyErr {
    let (param, tensor) = (name(place, param), describe(tensor));
    match fault {
        Fault::ParamDtype => PyRuntimeError::new_err(format!(
            "FusedAdam only support model weights in fp32, fp16, bf16 and fp8: {param} is none of these"
        )),
        Fault::GradDtype => PyRuntimeError::new_err(format!(
            "FusedAdam: the gradient of {param} has an unsupported dtype ({tensor}); \
             use float32, float16 or bfloat16"
        )),
        Fault::GradShape => PyRuntimeError::new_err(format!(
            "FusedAdam: the gradient of {param} has another shape ({tensor}); give it the parameter's local shape"
        )),
        Fault::Device(role) => PyRuntimeError::new_err(format!(
            "FusedAdam: the {} of {param} is not where the parameter is ({tensor}); move it to the parameter's device",
            role.name()
        )),
        Fault::StateSize(role) => PyRuntimeError::new_err(format!(
            "FusedAdam: the {} of {param} has another number of elements ({tensor}); \
             it must have those of the parameter's local shard",
            role.name()
        )),
        Fault::StateDtype(role, expected) => PyAssertionError::new_err(format!(
            "FusedAdam: the {} of {param} is {tensor}, but the optimizer's options call for torch.{}; \
             load or build the state with the same options",
            role.name(),
            expected.torch_name()
        )),
    }
}

/// Which tensor a fault is about.
pub fn role(fault: Fault) -> Role {
    match fault {
        Fault::ParamDtype => Role::Param,
        Fault::GradDtype | Fault::GradShape => Role::Grad,
        Fault::Device(role) | Fault::StateSize(role) | Fault::StateDtype(role, _) => role,
    }
}

/// fp16 and bf16 parameters in one group, which TE refuses.
pub fn mixed(place: Place, param: &Bound<'_, PyAny>, dtype: Dtype, remainders: bool) -> PyErr {
    let other = if dtype == Dtype::F16 { "bfloat16" } else { "float16" };
    let what = if remainders {
        "FusedAdam doesn't support a mix of FP16/BF16 weights + Store param remainder."
    } else {
        "FusedAdam does not support a mix of float16 and bfloat16 model weights."
    };
    PyRuntimeError::new_err(format!(
        "{what} {} stands beside {other} parameters with gradients; put them into groups of their own",
        name(place, param)
    ))
}

/// A DTensor beside a plain tensor.
pub fn parity(place: Place, param: &Bound<'_, PyAny>, role: Role, tensor: &Bound<'_, PyAny>) -> PyErr {
    let class = |object: &Bound<'_, PyAny>| object.get_type().to_string();
    PyAssertionError::new_err(format!(
        "[FusedAdam DTensor Disparity] {} is a {}, but its {} is a {} ({}); make both DTensors or both plain tensors",
        name(place, param),
        class(param),
        role.name(),
        class(tensor),
        describe(tensor)
    ))
}

/// A sparse gradient.
pub fn sparse(place: Place, param: &Bound<'_, PyAny>, grad: &Bound<'_, PyAny>) -> PyErr {
    PyRuntimeError::new_err(format!(
        "FusedAdam does not support sparse gradients. The gradient of {} is sparse ({}); make it dense, \
         or build the layer with sparse=False",
        name(place, param),
        describe(grad)
    ))
}

/// An error of torch's while a tensor was read, with the parameter's name put before it.
pub fn unreadable(error: PyErr, place: Place, param: &Bound<'_, PyAny>, role: Role) -> PyErr {
    let py = param.py();
    let raised = PyRuntimeError::new_err(format!(
        "FusedAdam: the {} of {} cannot be read: {}",
        role.name(),
        name(place, param),
        error.value(py)
    ));
    raised.set_cause(py, Some(error));
    raised
}

/// A quantized parameter in capturable mode, which TE refuses.
pub fn capturable_quantized(place: Place, param: &Bound<'_, PyAny>, class: &str) -> PyErr {
    PyRuntimeError::new_err(format!(
        "FusedAdam does not support FP8 model weights with capturable=True, nor other quantized ones: {} is a {class}; \
         build the optimizer with capturable=False",
        name(place, param)
    ))
}

/// A quantized parameter without a master: TE refuses most, and never updates those with delayed scaling.
pub fn no_master(place: Place, param: &Bound<'_, PyAny>, class: &str) -> PyErr {
    PyRuntimeError::new_err(format!(
        "FusedAdam without master_weights does not support {class} parameters. Use master_weights=True. ({} is one)",
        name(place, param)
    ))
}

/// A quantized parameter in an optimizer that keeps remainders, which only bf16 parameters have.
pub fn quantized_remainder(place: Place, param: &Bound<'_, PyAny>, class: &str) -> PyErr {
    PyRuntimeError::new_err(format!(
        "FusedAdam: store_param_remainders is for bfloat16 parameters, but {} is a {class}; \
         build the optimizer with store_param_remainders=False",
        name(place, param)
    ))
}
