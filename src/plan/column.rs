//! One parameter with everything that its update reads and writes, and what kernel that takes.
//! Plain data: knows nothing of Python or devices' APIs. Invariant: a `Work` is only made of tensors that hold the same
//! number of elements in the same order on the same device.

use crate::plan::operands::{ROLES, Scaling};
use crate::tensor::{Device, Dtype, Layout, View};

/// The part a tensor plays in the update of its parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The gradient.
    Grad,
    /// The parameter.
    Param,
    /// First moment.
    ExpAvg,
    /// Second moment.
    ExpAvgSq,
    /// fp32 or fp16 master, or the int16 remainder of one.
    Master,
}

impl Role {
    /// Roles in the order of the kernels' operands.
    pub const ALL: [Role; ROLES] = [Role::Grad, Role::Param, Role::ExpAvg, Role::ExpAvgSq, Role::Master];

    /// Key of the state that plays this role.
    pub fn name(self) -> &'static str {
        match self {
            Role::Grad => "gradient",
            Role::Param => "parameter",
            Role::ExpAvg => "exp_avg",
            Role::ExpAvgSq => "exp_avg_sq",
            Role::Master => "master_param",
        }
    }
}

/// How a parameter's fp32 value is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Master {
    /// The parameter is all there is.
    None,
    /// An fp32 copy.
    F32,
    /// A scaled fp16 copy.
    F16,
    /// A scaled fp16 copy beside an fp32 parameter: stock updates the parameter and only scales the copy anew.
    F16Idle,
    /// The bf16 parameter and an int16 remainder.
    Remainder,
}

/// A combination of storage types, for which one kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Gradient.
    pub grad: Dtype,
    /// Parameter.
    pub param: Dtype,
    /// First moment.
    pub exp_avg: Dtype,
    /// Second moment.
    pub exp_avg_sq: Dtype,
    /// Master.
    pub master: Master,
    /// Hyperparameters read on the device, gradients unscaled and written back.
    pub capturable: bool,
}

impl Variant {
    /// Name in reports: storage types of parameter, gradient, moments and master.
    pub fn name(self) -> String {
        let master = match self.master {
            Master::None => "no master",
            Master::F32 => "float32 master",
            Master::F16 => "float16 master",
            Master::F16Idle => "float16 master (not used)",
            Master::Remainder => "int16 remainder",
        };
        let [param, grad, exp_avg, exp_avg_sq] =
            [self.param, self.grad, self.exp_avg, self.exp_avg_sq].map(Dtype::torch_name);
        let moments = if exp_avg == exp_avg_sq {
            format!("{exp_avg} moments")
        } else {
            format!("{exp_avg} exp_avg, {exp_avg_sq} exp_avg_sq")
        };
        let mode = if self.capturable { ", capturable" } else { "" };
        format!("adam: {param} parameter, {grad} gradient, {moments}, {master}{mode}")
    }
}

/// What the plan remembers of a parameter's work: if it changes, the group is planned anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Elements.
    pub numel: u64,
    /// Kernel.
    pub variant: Variant,
    /// Device.
    pub device: Device,
}

/// One parameter's update: what kind, and the addresses of its operands.
#[derive(Clone, Debug)]
pub struct Work {
    /// Kind of work.
    pub signature: Signature,
    /// Addresses of the tensors in the order of [`Role::ALL`].
    pub tensors: [u64; ROLES],
    /// What scales them.
    pub scaling: Option<Box<[Scaling; ROLES]>>,
}

/// The tensors of one parameter that has a gradient.
#[derive(Clone, Debug)]
pub struct Column {
    /// Gradient.
    pub grad: View,
    /// Parameter.
    pub param: View,
    /// First moment.
    pub exp_avg: View,
    /// Second moment.
    pub exp_avg_sq: View,
    /// Master or remainder, as `kind` says.
    pub master: Option<View>,
    /// Their scaling in the order of [`Role::ALL`], where any is scaled.
    pub scaling: Option<Box<[Scaling; ROLES]>>,
    /// How the fp32 value is kept.
    pub kind: Master,
    /// Storage types of exp_avg and exp_avg_sq that the optimizer was built for.
    pub moments: [Dtype; 2],
    /// Whether the optimizer is capturable.
    pub capturable: bool,
}

/// Why a parameter cannot be updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The parameter's dtype has no kernel.
    ParamDtype,
    /// The gradient's dtype has no kernel.
    GradDtype,
    /// The gradient's shape is not the parameter's.
    GradShape,
    /// A tensor is not where its parameter is.
    Device(Role),
    /// A state has another number of elements than its parameter.
    StateSize(Role),
    /// A state has another dtype than the optimizer's options say.
    StateDtype(Role, Dtype),
}

/// What a checked column comes to.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// No elements, no work.
    Empty,
    /// Ready to run.
    Ready(Work),
    /// Right, but the tensors hold their elements in different orders or with gaps: a contiguous copy of some is needed.
    Unordered,
}

impl Column {
    /// What the plan would remember of it.
    pub fn signature(&self) -> Signature {
        let variant = Variant {
            grad: self.grad.dtype,
            param: self.param.dtype,
            exp_avg: self.moments[0],
            exp_avg_sq: self.moments[1],
            master: self.kind,
            capturable: self.capturable,
        };
        Signature { numel: self.param.numel, variant, device: self.param.device }
    }

    /// Checks that the tensors belong together and says what is to be done.
    pub fn check(&self) -> Result<Verdict, Fault> {
        let param = &self.param;
        if param.dtype.kernel_name().is_none() {
            return Err(Fault::ParamDtype);
        }
        if self.grad.shape != param.shape || self.grad.numel != param.numel {
            return Err(Fault::GradShape);
        }
        if !self.grad.dtype.is_gradient() {
            return Err(Fault::GradDtype);
        }
        let master_dtype = match self.kind {
            Master::None | Master::F32 => Dtype::F32,
            Master::F16 | Master::F16Idle => Dtype::F16,
            Master::Remainder => Dtype::I16,
        };
        let mut views = [Some(&self.grad), Some(param), Some(&self.exp_avg), Some(&self.exp_avg_sq), None];
        views[4] = self.master.as_ref();
        let expected = [self.grad.dtype, param.dtype, self.moments[0], self.moments[1], master_dtype];
        let mut tensors = [0; ROLES];
        let mut ordered = param.layout != Layout::SCATTERED;
        for (operand, role) in Role::ALL.into_iter().enumerate() {
            let Some(view) = views[operand] else { continue };
            if view.dtype != expected[operand] {
                return Err(Fault::StateDtype(role, expected[operand]));
            }
            if view.numel != param.numel {
                return Err(Fault::StateSize(role));
            }
            if view.device != param.device || view.device == Device::Other {
                return Err(Fault::Device(role));
            }
            ordered &= view.layout == param.layout && (view.layout == Layout::CONTIGUOUS || view.shape == param.shape);
            tensors[operand] = view.address;
        }
        if param.numel == 0 {
            return Ok(Verdict::Empty);
        }
        if !ordered {
            return Ok(Verdict::Unordered);
        }
        Ok(Verdict::Ready(Work { signature: self.signature(), tensors, scaling: self.scaling.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(dtype: Dtype, address: u64) -> View {
        View::new(address, &[6, 4], &[4, 1], dtype, Device::Cuda(1))
    }

    fn column() -> Column {
        Column {
            grad: view(Dtype::F32, 16),
            param: view(Dtype::BF16, 32),
            exp_avg: view(Dtype::F32, 48),
            exp_avg_sq: view(Dtype::F32, 64),
            master: Some(view(Dtype::I16, 80)),
            scaling: None,
            kind: Master::Remainder,
            moments: [Dtype::F32; 2],
            capturable: false,
        }
    }

    #[test]
    fn a_right_column_is_ready_with_its_addresses_in_order() {
        let Ok(Verdict::Ready(work)) = column().check() else { panic!("refused") };
        assert_eq!(work.tensors, [16, 32, 48, 64, 80]);
        assert_eq!(work.signature.variant.operands(), 5);
    }

    #[test]
    fn each_fault_is_named() {
        let wrong_shape = View::new(16, &[4, 6], &[6, 1], Dtype::F32, Device::Cuda(1));
        let elsewhere = View { device: Device::Cuda(0), ..view(Dtype::F32, 48) };
        let short = View { numel: 23, ..view(Dtype::F32, 48) };
        let fault = |column: Column| column.check().expect_err("accepted");
        assert_eq!(fault(Column { grad: wrong_shape, ..column() }), Fault::GradShape);
        assert_eq!(fault(Column { grad: view(Dtype::I16, 16), ..column() }), Fault::GradDtype);
        assert_eq!(fault(Column { param: view(Dtype::Other, 16), ..column() }), Fault::ParamDtype);
        assert_eq!(fault(Column { exp_avg: elsewhere, ..column() }), Fault::Device(Role::ExpAvg));
        assert_eq!(fault(Column { exp_avg_sq: short, ..column() }), Fault::StateSize(Role::ExpAvgSq));
        let wrong_master = Column { master: Some(view(Dtype::F32, 80)), ..column() };
        assert_eq!(fault(wrong_master), Fault::StateDtype(Role::Master, Dtype::I16));
    }

    #[test]
    fn different_memory_orders_need_a_copy() {
        let transposed = View::new(16, &[6, 4], &[1, 6], Dtype::F32, Device::Cuda(1));
        assert!(matches!(Column { grad: transposed, ..column() }.check(), Ok(Verdict::Unordered)));
        let slice = View::new(16, &[6, 4], &[8, 1], Dtype::F32, Device::Cuda(1));
        assert!(matches!(Column { exp_avg: slice, ..column() }.check(), Ok(Verdict::Unordered)));
    }

    #[test]
    fn no_elements_make_no_work() {
        let empty = |dtype| View::new(0, &[0, 4], &[4, 1], dtype, Device::Cuda(1));
        let column = Column {
            grad: empty(Dtype::F32),
            param: empty(Dtype::BF16),
            exp_avg: empty(Dtype::F32),
            exp_avg_sq: empty(Dtype::F32),
            master: Some(empty(Dtype::I16)),
            ..column()
        };
        assert!(matches!(column.check(), Ok(Verdict::Empty)));
    }
}
