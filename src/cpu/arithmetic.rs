//! The Adam update of a block of elements in fp32, and what bf16 elements are in fp32 and back. Safe code on slices.
//! The sequence of operations is that of `kernels/arithmetic.cuh`.

use half::bf16;

use crate::options::Scalars;

/// Elements of a block at most.
pub const BLOCK: usize = 1024;

/// How an element is stored.
pub trait Storage: Copy {
    /// Its fp32 value.
    fn widen(self) -> f32;
    /// The nearest stored element, that of even value in a tie.
    fn narrow(x: f32) -> Self;
}

impl Storage for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(x: f32) -> f32 {
        x
    }
}

impl Storage for bf16 {
    /// As torch widens: NaN keeps its bits.
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// NaN stays NaN.
    #[inline(always)]
    fn narrow(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        // Selected, not branched to, so that many go at once.
        bf16::from_bits((if x.is_nan() { bits | 0x40_0000 } else { rounded } >> 16) as u16)
    }
}

/// Elements of one of two storages.
pub enum Either<F, B> {
    /// fp32.
    F32(F),
    /// bf16.
    BF16(B),
}

/// Elements that are read.
pub type Source<'a> = Either<&'a [f32], &'a [bf16]>;
/// Elements that are read and written.
pub type Values<'a> = Either<&'a mut [f32], &'a mut [bf16]>;

impl<'a> Values<'a> {
    /// fp32 elements; none of others, which need no more work once they are updated.
    pub fn fp32(self) -> &'a mut [f32] {
        match self {
            Values::F32(elements) => elements,
            Values::BF16(_) => &mut [],
        }
    }
}

/// An expression once for every combination of storages that the named elements can have.
macro_rules! by_storage {
    ($call:expr) => { $call };
    ($call:expr, $elements:ident $(, $others:ident)*) => {
        match $elements {
            Either::F32($elements) => by_storage!($call $(, $others)*),
            Either::BF16($elements) => by_storage!($call $(, $others)*),
        }
    };
}

/// [`adam_update`] of elements of any storages.
pub fn adam_update_stored(
    scalars: &Scalars,
    capturable: bool,
    g: Source<'_>,
    p: &mut Values<'_>,
    m: &mut Values<'_>,
    v: &mut Values<'_>,
) {
    by_storage!(adam_update(scalars, capturable, g, p, m, v), g, p, m, v);
}

/// Updates `p`, `m` and `v` (equal lengths) from the gradient `g`, in fp32 whatever they are stored as. Capturable
/// kernels round the last product on its own, the others fuse it with the subtraction.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl+avx512bw+fma", "x86_64+avx2+fma"))]
pub fn adam_update<G: Storage, P: Storage, M: Storage, V: Storage>(
    scalars: &Scalars,
    capturable: bool,
    g: &[G],
    p: &mut [P],
    m: &mut [M],
    v: &mut [V],
) {
    let Scalars { lr, beta1, beta2, eps, weight_decay, correction1, correction2, adam_w } = *scalars;
    let (one_minus_beta1, one_minus_beta2) = (1.0 - beta1, 1.0 - beta2);
    let (inverse1, inverse2) = (1.0 / correction1, 1.0 / correction2);
    let adam_w = adam_w != 0;
    let count = g.len();
    let (p, m, v) = (&mut p[..count], &mut m[..count], &mut v[..count]);
    for i in 0..count {
        let old = p[i].widen();
        let gradient = g[i].widen();
        let gradient = if adam_w { gradient } else { old.mul_add(weight_decay, gradient) };
        let new_m = m[i].widen().mul_add(beta1, gradient * one_minus_beta1);
        let new_v = v[i].widen().mul_add(beta2, gradient * one_minus_beta2 * gradient);
        let denominator = (new_v * inverse2).sqrt() + eps;
        let ratio = new_m * inverse1 * (1.0 / denominator);
        let update = if adam_w { old.mul_add(weight_decay, ratio) } else { ratio };
        m[i] = M::narrow(new_m);
        v[i] = V::narrow(new_v);
        p[i] = P::narrow(if capturable { old - lr * update } else { (-update).mul_add(lr, old) });
    }
}

/// fp32 values of bf16 elements.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
pub fn widen_bf16(values: &mut [f32], source: &[bf16]) {
    values.iter_mut().zip(source).for_each(|(x, element)| *x = element.widen());
}

/// The nearest bf16 elements of fp32 values.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
pub fn narrow_bf16(target: &mut [bf16], values: &[f32]) {
    target.iter_mut().zip(values).for_each(|(element, &x)| *element = bf16::narrow(x));
}

/// fp32 values of bf16 parameters and their int16 remainders.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
pub fn merge_remainders(values: &mut [f32], high: &[u16], low: &[u16]) {
    values.iter_mut().zip(high.iter().zip(low)).for_each(|(x, (&high, &low))| *x = merge_remainder(high, low));
}

/// The bf16 parameters and int16 remainders of fp32 values.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
pub fn split_remainders(high: &mut [u16], low: &mut [u16], values: &[f32]) {
    high.iter_mut().zip(low).zip(values).for_each(|((high, low), &x)| (*high, *low) = split_remainder(x));
}

/// fp32 value of a bf16 parameter and its int16 remainder.
pub fn merge_remainder(high: u16, low: u16) -> f32 {
    let high = high.wrapping_sub(low >> 15);
    f32::from_bits(u32::from(high) << 16 | u32::from(low))
}

/// The bf16 parameter (rounded half away from zero) and int16 remainder of an fp32 value. NaN stays NaN in both, where
/// stock rounds it to -0.0.
pub fn split_remainder(x: f32) -> (u16, u16) {
    let bits = x.to_bits();
    let (high, low) = ((bits >> 16) as u16, bits as u16);
    if x.is_nan() { (high | 0x40, low & 0x7fff) } else { (high + (low >> 15), low) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use proptest::prelude::*;

    #[test]
    fn widening_keeps_every_bit_of_bf16() {
        let elements: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let mut values = vec![0.0; elements.len()];
        widen_bf16(&mut values, &elements);
        assert!(values.iter().zip(0u32..).all(|(x, bits)| x.to_bits() == bits << 16));
    }

    proptest! {
        #[test]
        fn narrowing_is_that_of_the_half_library(bits in prop::collection::vec(any::<u32>(), 1..70), tie in any::<u16>()) {
            let mut values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            values.extend([tie, tie ^ 1].map(|high| f32::from_bits(u32::from(high) << 16 | 0x8000)));
            let mut narrowed = vec![bf16::ZERO; values.len()];
            narrow_bf16(&mut narrowed, &values);
            for (element, x) in narrowed.into_iter().zip(values) {
                prop_assert_eq!(element.to_bits(), bf16::from_f32(x).to_bits());
            }
        }

        #[test]
        fn many_split_and_merge_as_one(bits in prop::collection::vec(any::<u32>(), 1..70)) {
            let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            let (mut high, mut low, mut merged) = (vec![0; values.len()], vec![0; values.len()], vec![0.0; values.len()]);
            split_remainders(&mut high, &mut low, &values);
            merge_remainders(&mut merged, &high, &low);
            for (at, &x) in values.iter().enumerate() {
                prop_assert_eq!((high[at], low[at]), split_remainder(x));
                prop_assert_eq!(merged[at].to_bits(), merge_remainder(high[at], low[at]).to_bits());
            }
        }

        #[test]
        fn splitting_and_merging_keeps_every_bit(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            let (high, low) = split_remainder(x);
            if x.is_nan() {
                prop_assert!(bf16::from_bits(high).is_nan() && merge_remainder(high, low).is_nan());
            } else {
                prop_assert_eq!(merge_remainder(high, low).to_bits(), bits);
            }
        }

        #[test]
        fn the_update_agrees_with_double_precision(
            g in -100f32..100.0, p in -10f32..10.0, m in -10f32..10.0, v in 0f32..100.0, step in 1i64..10_000,
            adam_w: bool, bias_correction: bool,
        ) {
            let options = Options {
                lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1, bias_correction, adam_w, step,
            };
            let scalars = Scalars::new(&options);
            let (mut p1, mut m1, mut v1) = ([p], [m], [v]);
            adam_update(&scalars, false, &[g], &mut p1, &mut m1, &mut v1);
            let (b1, b2) = (f64::from(scalars.beta1), f64::from(scalars.beta2));
            let (p, w) = (f64::from(p), f64::from(scalars.weight_decay));
            let g = f64::from(g) + if adam_w { 0.0 } else { p * w };
            let m = f64::from(m) * b1 + (1.0 - b1) * g;
            let v = f64::from(v) * b2 + (1.0 - b2) * g * g;
            let ratio = m / f64::from(scalars.correction1) / ((v / f64::from(scalars.correction2)).sqrt() + 1e-8);
            let expected = p - f64::from(scalars.lr) * (ratio + if adam_w { w * p } else { 0.0 });
            prop_assert!((f64::from(m1[0]) - m).abs() <= 1e-5 * m.abs().max(1.0), "{} {}", m1[0], m);
            prop_assert!((f64::from(v1[0]) - v).abs() <= 1e-5 * v.abs().max(1.0), "{} {}", v1[0], v);
            prop_assert!((f64::from(p1[0]) - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{} {expected}", p1[0]);
        }
    }

    #[test]
    fn the_gpus_nan_is_nan_in_the_parameter_too() {
        let (high, low) = split_remainder(f32::from_bits(0x7fff_ffff));
        assert!(bf16::from_bits(high).is_nan() && merge_remainder(high, low).is_nan());
    }

    #[test]
    fn ties_round_away_from_zero_and_edges_of_the_remainder_survive() {
        for low in [0u32, 0x7fff, 0x8000, 0x8001, 0xffff] {
            for high in [0x3f80u32, 0xbf80, 0, 0x8000, 0x7f7f] {
                let bits = high << 16 | low;
                let (h, l) = split_remainder(f32::from_bits(bits));
                assert_eq!(u32::from(h), high + (low >> 15));
                assert_eq!(merge_remainder(h, l).to_bits(), bits);
            }
        }
    }
}
