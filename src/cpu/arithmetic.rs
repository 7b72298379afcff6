//! The Adam update of a block of elements in fp32, and what bf16 elements are in fp32 and back. Safe code on slices.
//! The sequence of operations is that of `kernels/arithmetic.cuh`.

use crate::options::Scalars;

/// Elements of a block at most.
pub const BLOCK: usize = 1024;

/// Updates `p`, `m` and `v` (equal lengths) from the gradient `g`. Capturable kernels round the last product on its
/// own, the others fuse it with the subtraction.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl+fma", "x86_64+avx2+fma"))]
pub fn adam_update(scalars: &Scalars, capturable: bool, g: &[f32], p: &mut [f32], m: &mut [f32], v: &mut [f32]) {
    let Scalars { lr, beta1, beta2, eps, weight_decay, correction1, correction2, adam_w } = *scalars;
    let (one_minus_beta1, one_minus_beta2) = (1.0 - beta1, 1.0 - beta2);
    let (inverse1, inverse2) = (1.0 / correction1, 1.0 / correction2);
    let adam_w = adam_w != 0;
    let count = g.len();
    let (p, m, v) = (&mut p[..count], &mut m[..count], &mut v[..count]);
    for i in 0..count {
        let old = p[i];
        let gradient = if adam_w { g[i] } else { old.mul_add(weight_decay, g[i]) };
        m[i] = m[i].mul_add(beta1, gradient * one_minus_beta1);
        v[i] = v[i].mul_add(beta2, gradient * one_minus_beta2 * gradient);
        let denominator = (v[i] * inverse2).sqrt() + eps;
        let ratio = m[i] * inverse1 * (1.0 / denominator);
        let update = if adam_w { old.mul_add(weight_decay, ratio) } else { ratio };
        p[i] = if capturable { old - lr * update } else { (-update).mul_add(lr, old) };
    }
}

/// fp32 values of bf16 bits, as torch widens them: NaN keeps its bits.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
pub fn widen_bf16(values: &mut [f32], bits: &[u16]) {
    values.iter_mut().zip(bits).for_each(|(x, &bits)| *x = f32::from_bits(u32::from(bits) << 16));
}

/// The nearest bf16 bits of fp32 values, those of even value in a tie; NaN stays NaN.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
pub fn narrow_bf16(target: &mut [u16], values: &[f32]) {
    for (target, x) in target.iter_mut().zip(values) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        // Selected, not branched to, so that many go at once.
        *target = (if x.is_nan() { bits | 0x40_0000 } else { rounded } >> 16) as u16;
    }
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
    use half::bf16;
    use proptest::prelude::*;

    #[test]
    fn widening_keeps_every_bit_of_bf16() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let mut values = vec![0.0; bits.len()];
        widen_bf16(&mut values, &bits);
        assert!(values.iter().zip(&bits).all(|(x, &bits)| x.to_bits() == u32::from(bits) << 16));
    }

    proptest! {
        #[test]
        fn narrowing_is_that_of_the_half_library(bits in prop::collection::vec(any::<u32>(), 1..70), tie in any::<u16>()) {
            let mut values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
            values.extend([tie, tie ^ 1].map(|high| f32::from_bits(u32::from(high) << 16 | 0x8000)));
            let mut narrowed = vec![0; values.len()];
            narrow_bf16(&mut narrowed, &values);
            let expected: Vec<u16> = values.iter().map(|&x| bf16::from_f32(x).to_bits()).collect();
            prop_assert_eq!(narrowed, expected);
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
