//! UNSAFE: reads and writes the factors of scaled tensors, one fp32 number each. The rules are those of
//! `kernels/scaling.cuh`. Invariant: arithmetic is torch's, IEEE fp32 with subnormals.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::plan::column::{Role, Variant};
use crate::plan::operands::{Addresses, ROLES, Scaled, Scaling};

const FP16_RANGE: f32 = 32752.0;
const FP8_RANGE: f32 = 448.0;
/// The smallest power of two whose reciprocal is finite.
const SMALLEST: f32 = f32::from_bits(1 << 22);
const INFINITY_BITS: u32 = 0x7f80_0000;

/// What the elements of one tensor are multiplied by when read and when written, per role; 1 where it is not scaled.
#[derive(Clone, Copy, Debug)]
pub struct Factors {
    /// When read.
    pub read: [f32; ROLES],
    /// When written.
    pub write: [f32; ROLES],
}

/// Bits of the largest magnitudes of a tensor's new values: with NaN as the largest of all, and without NaN.
#[derive(Debug, Default)]
pub struct Found {
    absmax: [AtomicU32; ROLES],
    amax: [AtomicU32; ROLES],
}

impl Found {
    /// Takes values of one role into account.
    pub fn raise(&self, role: Role, values: &[f32]) {
        let (mut absmax, mut amax) = (0, 0);
        for value in values {
            let magnitude = value.to_bits() & 0x7fff_ffff;
            absmax = magnitude.max(absmax);
            amax = if magnitude <= INFINITY_BITS { magnitude.max(amax) } else { amax };
        }
        self.absmax[role as usize].fetch_max(absmax, Ordering::Relaxed);
        self.amax[role as usize].fetch_max(amax, Ordering::Relaxed);
    }
}

/// The factors before an update.
///
/// # Safety
/// The scaling addresses that the variant has must be those of one fp32 element each.
pub unsafe fn read(variant: &Variant, addresses: &Addresses) -> Factors {
    let mut factors = Factors { read: [1.0; ROLES], write: [1.0; ROLES] };
    for role in Role::ALL {
        let (at, scaling) = (role as usize, &addresses.scaling[role as usize]);
        // SAFETY: the caller's promise.
        unsafe {
            match variant.scaled(role) {
                Scaled::No => {}
                Scaled::Factor => factors.read[at] = get(scaling.factor),
                Scaled::State => factors.read[at] = get(scaling.scale_inv),
                Scaled::Param => factors.write[at] = get(scaling.scale),
            }
        }
    }
    factors
}

/// Puts the new factors of states where stock keeps them, and in `factors.write`.
///
/// # Safety
/// As for [`read`].
pub unsafe fn exchange(variant: &Variant, addresses: &Addresses, factors: &mut Factors, found: &Found) {
    for role in Role::ALL {
        let (at, scaling) = (role as usize, &addresses.scaling[role as usize]);
        // SAFETY: the caller's promise.
        unsafe {
            match variant.scaled(role) {
                Scaled::No | Scaled::Param => {}
                Scaled::Factor | Scaled::State => {
                    factors.write[at] = put_factor(variant.scaled(role) == Scaled::State, scaling, found, role);
                }
            }
        }
    }
}

/// Puts the numbers that scale a state with these values where stock keeps them, an fp8 `state` or an fp16 one; returns
/// what its values are multiplied by when written.
///
/// # Safety
/// The scaling addresses must be those of one fp32 element each.
pub unsafe fn put_factor(state: bool, scaling: &Scaling, found: &Found, role: Role) -> f32 {
    let absmax = f32::from_bits(found.absmax[role as usize].load(Ordering::Relaxed));
    // SAFETY: the caller's promise.
    unsafe {
        if !state {
            let factor = new_factor(absmax, FP16_RANGE);
            put(scaling.factor, factor);
            return if factor > 0.0 { 1.0 / factor } else { 0.0 };
        }
        let factor = new_factor(absmax, FP8_RANGE);
        let scale = 1.0 / if factor == 0.0 { SMALLEST } else { factor };
        put(scaling.factor, factor);
        put(scaling.scale, scale);
        put(scaling.scale_inv, 1.0 / scale);
        raise_amax(scaling.amax, &found.amax[role as usize]);
        scale
    }
}

/// Puts what the quantizer of an fp8 parameter records where stock keeps it.
///
/// # Safety
/// As for [`read`].
pub unsafe fn finish(variant: &Variant, addresses: &Addresses, factors: &Factors, found: &Found) {
    if variant.scaled(Role::Param) == Scaled::Param {
        let at = Role::Param as usize;
        // SAFETY: the caller's promise.
        unsafe {
            put(addresses.scaling[at].scale_inv, 1.0 / factors.write[at]);
            raise_amax(addresses.scaling[at].amax, &found.amax[at]);
        }
    }
}

/// The factor of values up to `absmax`. Where its reciprocal overflows, stock writes NaN or infinity.
fn new_factor(absmax: f32, range: f32) -> f32 {
    let factor = absmax / range;
    if factor > 0.0 && (1.0 / factor).is_infinite() { SMALLEST } else { factor }
}

unsafe fn raise_amax(address: u64, found: &AtomicU32) {
    let found = f32::from_bits(found.load(Ordering::Relaxed));
    // SAFETY: the caller's promise.
    unsafe { put(address, get(address).max(found)) };
}

/// An fp32 number.
///
/// # Safety
/// One must be there.
pub unsafe fn get(address: u64) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { *(address as *const f32) }
}

unsafe fn put(address: u64, value: f32) {
    // SAFETY: the caller's promise.
    unsafe { *(address as *mut f32) = value };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_keep_their_reciprocal_finite() {
        assert_eq!(SMALLEST, 2f32.powi(-127));
        // Adam flushes subnormals, so nothing smaller arrives.
        for absmax in [f32::MIN_POSITIVE, 1e-36, 1e-30, 1.0, f32::MAX] {
            let factor = new_factor(absmax, FP16_RANGE);
            assert!(factor > 0.0 && (1.0 / factor).is_finite(), "{absmax:e}");
        }
        assert_eq!(new_factor(0.0, FP8_RANGE), 0.0);
        assert!(new_factor(f32::NAN, FP8_RANGE).is_nan());
    }

    #[test]
    fn nan_is_the_largest_magnitude_and_no_amax() {
        let found = Found::default();
        found.raise(Role::ExpAvg, &[1.0, f32::NAN, -3.0]);
        let at = Role::ExpAvg as usize;
        assert!(f32::from_bits(found.absmax[at].load(Ordering::Relaxed)).is_nan());
        assert_eq!(f32::from_bits(found.amax[at].load(Ordering::Relaxed)), 3.0);
    }
}
