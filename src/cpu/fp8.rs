//! fp8 and fp32. Safe code; the same steps as `kernels/convert.cuh` takes on GPUs without instructions for it.
//! Narrowing rounds to nearest even and saturates; NaN is 0x7f.

/// A format with `MANTISSA` bits kept, exponent bias `BIAS` and largest finite code `LARGEST`.
struct Format<const MANTISSA: u32, const BIAS: u32, const LARGEST: u32>;

impl<const MANTISSA: u32, const BIAS: u32, const LARGEST: u32> Format<MANTISSA, BIAS, LARGEST> {
    fn narrow(x: f32) -> u8 {
        let magnitude = x.to_bits() & 0x7fff_ffff;
        if magnitude > 0x7f80_0000 {
            return 0x7f;
        }
        let dropped = 23 - MANTISSA;
        // The exponent field, as fp32 has it, of the smallest normal.
        let smallest = 128 - BIAS;
        let code = if magnitude < smallest << 23 {
            // Adding a power of two whose last place is the quantum of subnormals leaves their code in the low bits.
            let anchor = f32::from_bits((smallest + dropped) << 23);
            (f32::from_bits(magnitude) + anchor).to_bits() & 0xff
        } else {
            let rounded = magnitude + (1 << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
            (rounded >> dropped) - ((smallest - 1) << MANTISSA)
        };
        code.min(LARGEST) as u8 | (x.to_bits() >> 24 & 0x80) as u8
    }
}

/// To 4 bits of exponent and 3 of mantissa.
pub fn narrow_e4m3(x: f32) -> u8 {
    Format::<3, 7, 0x7e>::narrow(x)
}

/// To 5 bits of exponent and 2 of mantissa.
pub fn narrow_e5m2(x: f32) -> u8 {
    Format::<2, 15, 0x7b>::narrow(x)
}

/// From 4 bits of exponent and 3 of mantissa.
pub fn widen_e4m3(code: u8) -> f32 {
    // The bits as an fp32 whose exponent is 120 too small; the product is exact, subnormals included.
    let x = f32::from_bits(u32::from(code & 0x7f) << 20) * f32::from_bits((127 + 120) << 23);
    let x = if code & 0x7f == 0x7f { f32::NAN } else { x };
    if code & 0x80 == 0 { x } else { -x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Value of a code by the definition of the format.
    fn value(code: u8, mantissa: i32, bias: i32) -> f64 {
        let (exponent, fraction) = (i32::from(code & 0x7f) >> mantissa, f64::from(code & ((1 << mantissa) - 1)));
        let one = f64::from(1 << mantissa);
        if exponent == 0 {
            fraction / one * 2f64.powi(1 - bias)
        } else {
            (1.0 + fraction / one) * 2f64.powi(exponent - bias)
        }
    }

    /// Code of the nearest value, the even one of two.
    fn nearest(x: f64, mantissa: i32, bias: i32, largest: u8) -> u8 {
        let distance = |&code: &u8| (value(code, mantissa, bias) - x).abs();
        let best = (0..=largest).min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("there are codes");
        let tie = best < largest && distance(&best) == distance(&(best + 1));
        if tie && best % 2 == 1 { best + 1 } else { best }
    }

    #[test]
    fn every_code_survives_the_round_trip() {
        for code in (0..=0x7eu8).chain(0x80..=0xfe) {
            let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
            assert_eq!(f64::from(widen_e4m3(code)), sign * value(code, 3, 7));
            assert_eq!(narrow_e4m3(widen_e4m3(code)), code);
        }
        assert!(widen_e4m3(0x7f).is_nan());
        for code in (0..=0x7bu8).chain(0x80..=0xfb) {
            let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
            assert_eq!(narrow_e5m2((sign * value(code, 2, 15)) as f32), code);
        }
    }

    #[test]
    fn what_is_too_large_saturates_and_nan_stays() {
        for (x, e4m3, e5m2) in [(f32::INFINITY, 0x7e, 0x7b), (f32::MIN, 0xfe, 0xfb), (f32::NAN, 0x7f, 0x7f)] {
            assert_eq!((narrow_e4m3(x), narrow_e5m2(x)), (e4m3, e5m2));
        }
    }

    proptest! {
        #[test]
        fn narrowing_takes_the_nearest_even(fraction in -2.0f32..2.0, exponent in -20i32..20) {
            let x = fraction * 2f32.powi(exponent);
            let sign = (x.to_bits() >> 24 & 0x80) as u8;
            prop_assert_eq!(narrow_e4m3(x), sign | nearest(f64::from(x.abs()), 3, 7, 0x7e));
            prop_assert_eq!(narrow_e5m2(x), sign | nearest(f64::from(x.abs()), 2, 15, 0x7b));
        }
    }
}
