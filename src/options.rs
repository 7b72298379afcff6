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

/// What a launch is given; the head of the kernels' `Launch`.
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
        let correction = |beta: f32| {
            if options.bias_correction { (1.0 - f64::from(beta).powf(options.step as f64)) as f32 } else { 1.0 }
        };
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

    /// The scalars as the words that open a launch.
    pub fn words(&self) -> [u64; 4] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        [
            pair(self.lr.to_bits(), self.beta1.to_bits()),
            pair(self.beta2.to_bits(), self.eps.to_bits()),
            pair(self.weight_decay.to_bits(), self.correction1.to_bits()),
            pair(self.correction2.to_bits(), self.adam_w),
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
