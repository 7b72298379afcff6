//! The numbers a group's step depends on, rounded as Transformer Engine rounds them.
//! Knows nothing of tensors. Source: te-facts of the kernels' host code: scalars become float at the call, the bias
//! corrections are computed in double from the already rounded betas by the C library's pow and rounded once.

/// Hyperparameters of one group for one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Learning rate.
    pub lr: f64,
    /// Decay of exp_avg.
    pub beta1: f64,
    /// Decay of exp_avg_sq.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Divide the moments by 1 - beta^step.
    pub bias_correction: bool,
    /// Decoupled weight decay; else it is added to the gradient (L2).
    pub adam_w: bool,
    /// The step this is, from 1.
    pub step: i64,
}

/// What a launch is given by value; the head of the kernels' `Launch`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(C)]
pub struct Scalars {
    /// Learning rate.
    pub lr: f32,
    /// Decay of exp_avg.
    pub beta1: f32,
    /// Decay of exp_avg_sq.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// 1 - beta1^step, or 1.
    pub correction1: f32,
    /// 1 - beta2^step, or 1.
    pub correction2: f32,
    /// 1 AdamW, 0 L2.
    pub adam_w: u32,
}

impl Scalars {
    /// Rounds `options` to what the kernels take.
    pub fn new(options: &Options) -> Scalars {
        let (beta1, beta2) = (options.beta1 as f32, options.beta2 as f32);
        let correction = |beta| if options.bias_correction { bias_correction(beta, options.step as f64) } else { 1.0 };
        Scalars {
            lr: options.lr as f32,
            beta1,
            beta2,
            eps: options.eps as f32,
            weight_decay: options.weight_decay as f32,
            correction1: correction(beta1),
            correction2: correction(beta2),
            adam_w: u32::from(options.adam_w),
        }
    }
}

impl Scalars {
    /// These with the learning rate and, for bias correction, the step that the device has.
    pub fn with_live(self, lr: f32, step: Option<i32>) -> Scalars {
        let correction = |beta: f32| step.map_or(1.0, |step| bias_correction(beta, f64::from(step)));
        Scalars { lr, correction1: correction(self.beta1), correction2: correction(self.beta2), ..self }
    }
}

/// 1 - beta^step: the power in double by the C library, rounded once.
fn bias_correction(beta: f32, step: f64) -> f32 {
    (1.0 - f64::from(beta).powf(step)) as f32
}

/// Addresses of what a capturable launch reads on the device; all 0 otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Live {
    /// Learning rate, fp32.
    pub lr: u64,
    /// Step this is, int32.
    pub step: u64,
    /// What gradients are multiplied by, fp32.
    pub inv_scale: u64,
    /// 1 if nothing must be updated, int32.
    pub skip: u64,
}

/// Everything of a launch but its tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Header {
    /// By value.
    pub scalars: Scalars,
    /// By address.
    pub live: Live,
    /// Whether a capturable launch computes bias corrections.
    pub bias_correction: bool,
    /// Address of the memory that a launch over scaled states needs for itself; 0 without.
    pub found: u64,
}

impl Header {
    /// Words of a header and the tensor count.
    pub const WORDS: usize = 10;

    /// The header of a step whose numbers the host has.
    pub fn new(options: &Options) -> Header {
        Header { scalars: Scalars::new(options), ..Header::default() }
    }

    /// The header of a step whose numbers the device has; `lr` and `step` of `options` are not used.
    pub fn live(options: &Options, live: Live) -> Header {
        let scalars = Scalars::new(&Options { bias_correction: false, ..*options });
        Header { scalars, live, bias_correction: options.bias_correction, found: 0 }
    }

    /// The words that open a launch of `tensors` tensors.
    pub fn words(&self, tensors: usize) -> [u64; Header::WORDS] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let (s, live) = (&self.scalars, &self.live);
        [
            pair(s.lr.to_bits(), s.beta1.to_bits()),
            pair(s.beta2.to_bits(), s.eps.to_bits()),
            pair(s.weight_decay.to_bits(), s.correction1.to_bits()),
            pair(s.correction2.to_bits(), s.adam_w),
            live.lr,
            live.step,
            live.inv_scale,
            live.skip,
            self.found,
            pair(tensors as u32, u32::from(self.bias_correction)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corrections_use_the_rounded_betas_in_double() {
        let options = Options {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.1,
            bias_correction: true,
            adam_w: true,
            step: 1,
        };
        let scalars = Scalars::new(&options);
        assert_eq!(scalars.correction1, (1.0 - f64::from(0.9f32)) as f32);
        assert_ne!(scalars.correction2, (1.0 - 0.999f64) as f32, "the betas were not rounded first");
        let off = Scalars::new(&Options { bias_correction: false, ..options });
        assert_eq!((off.correction1, off.correction2), (1.0, 1.0));
    }
}
