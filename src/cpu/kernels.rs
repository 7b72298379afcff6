//! UNSAFE: runs a table on host memory. The one place that makes slices from tensors' addresses.
//! Invariant: a block reads and writes only the elements of its own chunk.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use crate::cpu::arithmetic::{
    BLOCK, Source, Values, adam_update_stored, merge_remainders, narrow_bf16, split_remainders, widen_bf16,
};
use crate::cpu::fp8::{narrow_e4m3, narrow_e5m2, widen_e4m3};
use crate::cpu::scaling::{self, Factors, Found};
use crate::options::{Header, Live, Scalars};
use crate::plan::column::{Master, Role, Variant};
use crate::plan::operands::{Addresses, Scaled};
use crate::plan::table::{CHUNK, Table};
use crate::tensor::Dtype;
use crate::threads::KERNELS;

/// fp32 gradient, value, moments and unused master of one block.
struct Scratch([Box<[f32; BLOCK]>; 5]);

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch([(); 5].map(|()| Box::new([0.0; BLOCK])))
    }
}

/// Runs one launch.
///
/// # Safety
/// Every tensor with a gradient must have, at each of its addresses, `numel` elements of the variant's type, or for
/// scaling one fp32 element, that stay valid for the call; what the update writes is touched by nothing else meanwhile.
/// The live addresses of a capturable launch must be those of one element each.
pub unsafe fn adam(table: &Table, variant: Variant, header: &Header) {
    let mut update = Update { variant, scalars: header.scalars, inv_scale: None };
    if variant.capturable {
        // SAFETY: the caller's promise for the live addresses.
        let (lr, step, scale, skip) = unsafe { read_live(&header.live) };
        if skip == 1 {
            return;
        }
        update.inv_scale = Some(scale);
        update.scalars = update.scalars.with_live(lr, header.bias_correction.then_some(step));
    }
    let mut tensors: Vec<(u64, Addresses, Factors)> = (0..table.len())
        .filter(|&tensor| table.addresses(tensor)[0] != 0)
        .map(|tensor| {
            let addresses = Addresses::unpack(&variant, table.addresses(tensor));
            // SAFETY: the caller's promise for the scaling.
            (table.numel(tensor), addresses, unsafe { scaling::read(&variant, &addresses) })
        })
        .collect();
    if variant.two_passes() {
        // SAFETY: the caller's promise.
        let found = unsafe { update.run(&tensors, false) };
        for ((_, addresses, factors), found) in tensors.iter_mut().zip(&found) {
            // SAFETY: the caller's promise for the scaling.
            unsafe { scaling::exchange(&variant, addresses, factors, found) };
        }
    }
    // SAFETY: the caller's promise.
    let found = unsafe { update.run(&tensors, true) };
    for ((_, addresses, factors), found) in tensors.iter().zip(&found) {
        // SAFETY: the caller's promise for the scaling.
        unsafe { scaling::finish(&variant, addresses, factors, found) };
    }
}

/// What all elements of a launch share.
struct Update {
    variant: Variant,
    scalars: Scalars,
    inv_scale: Option<f32>,
}

impl Update {
    /// Runs over all chunks; returns the largest magnitudes per tensor. Writes nothing if not told to.
    ///
    /// # Safety
    /// As for [`adam`].
    unsafe fn run(&self, tensors: &[(u64, Addresses, Factors)], write: bool) -> Vec<Found> {
        let found: Vec<Found> = tensors.iter().map(|_| Found::default()).collect();
        let chunks: Vec<(usize, u64)> = tensors
            .iter()
            .enumerate()
            .flat_map(|(tensor, (numel, ..))| (0..numel.div_ceil(CHUNK)).map(move |chunk| (tensor, chunk)))
            .collect();
        let work = |scratch: &mut Scratch, number: u64| {
            let (tensor, chunk) = chunks[number as usize];
            let (numel, addresses, factors) = &tensors[tensor];
            let end = (*numel).min((chunk + 1) * CHUNK);
            let mut start = chunk * CHUNK;
            while start < end {
                let count = (end - start).min(BLOCK as u64);
                // SAFETY: the elements lie within the tensors by the caller's promise, and no other chunk has them.
                unsafe {
                    self.block(addresses, factors, start as usize, count as usize, scratch, &found[tensor], write)
                };
                start += count;
            }
        };
        let elements = tensors.iter().map(|(numel, ..)| numel).sum();
        KERNELS.each(chunks.len() as u64, elements, Scratch::default, work);
        found
    }
}

/// Learning rate, step, inverse scale and skip flag of a capturable launch.
///
/// # Safety
/// The addresses must hold one element each.
unsafe fn read_live(live: &Live) -> (f32, i32, f32, i32) {
    // SAFETY: the caller's promise.
    unsafe {
        let float = |address: u64| *(address as *const f32);
        let int = |address: u64| *(address as *const i32);
        (float(live.lr), int(live.step), float(live.inv_scale), int(live.skip))
    }
}

impl Update {
    /// Updates `count` elements from `start`, or only finds their new magnitudes.
    ///
    /// # Safety
    /// As for [`adam`], for these elements.
    #[allow(clippy::too_many_arguments, reason = "one block of one tensor")]
    unsafe fn block(
        &self,
        addresses: &Addresses,
        factors: &Factors,
        start: usize,
        count: usize,
        scratch: &mut Scratch,
        found: &Found,
        write: bool,
    ) {
        let Update { variant, scalars, inv_scale } = self;
        let [g, p, m, v, idle] = scratch.0.each_mut().map(|buffer| &mut buffer[..count]);
        let [grad, param, exp_avg, exp_avg_sq, master] = addresses.tensors;
        let [_, _, read_m, read_v, read_master] = factors.read;
        let [_, write_p, write_m, write_v, write_master] = factors.write;
        // fp32 and bf16 elements are updated where they are, unless tensors share memory.
        let apart = |a: u64, b: u64| a.abs_diff(b) >= (count * size_of::<f32>()) as u64;
        let used = [grad, param, exp_avg, exp_avg_sq, master];
        let alone = (1..used.len()).all(|at| used[..at].iter().all(|&other| apart(used[at], other)));
        let in_place = |dtype| write && alone && inv_scale.is_none() && matches!(dtype, Dtype::F32 | Dtype::BF16);
        let value_is_param = matches!(variant.master, Master::None | Master::F16Idle);
        // SAFETY: by the caller's promise these addresses hold `start + count` elements of these types.
        let (g, mut p, mut m, mut v) = unsafe {
            let p = match variant.master {
                Master::None => values(in_place(variant.param), variant.param, param, start, 1.0, p),
                Master::F32 => values(in_place(Dtype::F32), Dtype::F32, master, start, 1.0, p),
                Master::F16 => values(false, Dtype::F16, master, start, read_master, p),
                Master::F16Idle => {
                    load(Dtype::F16, master, start, read_master, idle);
                    values(in_place(variant.param), variant.param, param, start, 1.0, p)
                }
                Master::Remainder => {
                    let (high, low) = (elements::<u16>(param, start, count), elements::<u16>(master, start, count));
                    merge_remainders(p, high, low);
                    Values::F32(p)
                }
            };
            let m = values(in_place(variant.exp_avg), variant.exp_avg, exp_avg, start, read_m, m);
            let v = values(in_place(variant.exp_avg_sq), variant.exp_avg_sq, exp_avg_sq, start, read_v, v);
            (gradients(in_place(variant.grad), variant.grad, grad, start, *inv_scale, g), p, m, v)
        };
        adam_update_stored(scalars, variant.capturable, g, &mut p, &mut m, &mut v);
        let [p, m, v] = [p, m, v].map(Values::fp32);
        if !write {
            found.raise(Role::ExpAvg, m);
            found.raise(Role::ExpAvgSq, v);
            found.raise(Role::Master, if variant.master == Master::F16Idle { idle } else { p });
            return;
        }
        // SAFETY: as above; what was updated where it is is not referred to again.
        unsafe {
            if !in_place(variant.exp_avg) {
                store(variant.exp_avg, exp_avg, start, write_m, m);
            }
            if !in_place(variant.exp_avg_sq) {
                store(variant.exp_avg_sq, exp_avg_sq, start, write_v, v);
            }
            if variant.master == Master::Remainder {
                let (high, low) = (elements::<u16>(param, start, count), elements::<u16>(master, start, count));
                split_remainders(high, low, p);
                return;
            }
            if !(value_is_param && in_place(variant.param)) {
                store(variant.param, param, start, write_p, p);
            }
            match variant.master {
                Master::F32 if !in_place(Dtype::F32) => store(Dtype::F32, master, start, 1.0, p),
                Master::F16 => store(Dtype::F16, master, start, write_master, p),
                Master::F16Idle => store(Dtype::F16, master, start, write_master, idle),
                Master::None | Master::F32 | Master::Remainder => {}
            }
        }
        if variant.scaled(Role::Param) != Scaled::No {
            found.raise(Role::Param, p);
        }
    }
}

/// Elements `start..start + count` at `address`, which torch aligns to their size.
///
/// # Safety
/// They must be valid for reads and writes, and referred to by nothing else.
unsafe fn elements<'a, T>(address: u64, start: usize, count: usize) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut((address as *mut T).add(start), count) }
}

/// fp32 and bf16 elements where they are, or others widened into a buffer.
///
/// # Safety
/// As for [`elements`].
unsafe fn values(
    in_place: bool,
    dtype: Dtype,
    address: u64,
    start: usize,
    factor: f32,
    buffer: &mut [f32],
) -> Values<'_> {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            Dtype::F32 if in_place => Values::F32(elements(address, start, buffer.len())),
            Dtype::BF16 if in_place => Values::BF16(elements(address, start, buffer.len())),
            _ => {
                load(dtype, address, start, factor, buffer);
                Values::F32(buffer)
            }
        }
    }
}

/// Gradients where they are, or widened into a buffer; those of a capturable step are unscaled, and written back.
///
/// # Safety
/// As for [`load`] and, for a capturable step, [`store`].
unsafe fn gradients(
    in_place: bool,
    dtype: Dtype,
    address: u64,
    start: usize,
    inv_scale: Option<f32>,
    buffer: &mut [f32],
) -> Source<'_> {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            Dtype::F32 if in_place => Source::F32(shared(address, start, buffer.len())),
            Dtype::BF16 if in_place => Source::BF16(shared(address, start, buffer.len())),
            _ => {
                load(dtype, address, start, 1.0, buffer);
                if let Some(inv_scale) = inv_scale {
                    buffer.iter_mut().for_each(|g| *g *= inv_scale);
                    store(dtype, address, start, 1.0, buffer);
                }
                Source::F32(buffer)
            }
        }
    }
}

/// Elements that are only read. Gradients may be shared between tensors: no `&mut` to them is made.
///
/// # Safety
/// They must be valid for reads, and written by nothing meanwhile.
unsafe fn shared<'a, T>(address: u64, start: usize, count: usize) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts((address as *const T).add(start), count) }
}

/// Widens elements to fp32 and multiplies them by what they were divided by.
///
/// # Safety
/// As for [`elements`].
pub unsafe fn load(dtype: Dtype, address: u64, start: usize, factor: f32, out: &mut [f32]) {
    let count = out.len();
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            Dtype::BF16 => widen_bf16(out, shared(address, start, count)),
            Dtype::F16 => shared::<f16>(address, start, count).convert_to_f32_slice(out),
            Dtype::E4M3 => {
                let source = shared(address, start, count);
                out.iter_mut().zip(source).for_each(|(out, &code)| *out = widen_e4m3(code));
            }
            _ => out.copy_from_slice(shared(address, start, count)),
        }
    }
    if factor != 1.0 {
        out.iter_mut().for_each(|x| *x *= factor);
    }
}

/// Multiplies fp32 values, rounds them to nearest even and stores them.
///
/// # Safety
/// As for [`elements`].
pub unsafe fn store(dtype: Dtype, address: u64, start: usize, factor: f32, values: &[f32]) {
    let mut scaled;
    let values = if factor == 1.0 {
        values
    } else {
        scaled = [0.0; BLOCK];
        let scaled = &mut scaled[..values.len()];
        scaled.iter_mut().zip(values).for_each(|(scaled, x)| *scaled = x * factor);
        scaled
    };
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            Dtype::BF16 => narrow_bf16(elements(address, start, values.len()), values),
            Dtype::F16 => {
                elements::<u16>(address, start, values.len())
                    .reinterpret_cast_mut::<f16>()
                    .convert_from_f32_slice(values);
            }
            Dtype::E4M3 | Dtype::E5M2 => {
                let narrow = if dtype == Dtype::E4M3 { narrow_e4m3 } else { narrow_e5m2 };
                let target = elements::<u8>(address, start, values.len());
                target.iter_mut().zip(values).for_each(|(code, &x)| *code = narrow(x));
            }
            _ => elements::<f32>(address, start, values.len()).copy_from_slice(values),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::arithmetic::{merge_remainder, split_remainder};
    use crate::options::Options;
    use half::bf16;

    fn header() -> Header {
        Header::new(&Options {
            lr: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            bias_correction: true,
            adam_w: true,
            step: 3,
        })
    }

    fn variant(grad: Dtype, param: Dtype, master: Master) -> Variant {
        Variant { grad, param, exp_avg: Dtype::F32, exp_avg_sq: Dtype::F32, master, capturable: false }
    }

    fn values(count: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..count).map(|_| next()).collect()
    }

    #[test]
    fn a_remainder_and_an_fp32_master_take_the_same_path() {
        let count = CHUNK as usize + 1_029;
        let grad: Vec<bf16> = values(count, 1).into_iter().map(bf16::from_f32).collect();
        let mut master = values(count, 2);
        let mut high: Vec<u16> = master.iter().map(|&x| split_remainder(x).0).collect();
        let mut low: Vec<u16> = master.iter().map(|&x| split_remainder(x).1).collect();
        let mut rounded = vec![bf16::ZERO; count];
        let [mut m1, mut v1, mut m2, mut v2] = [(); 4].map(|()| vec![0.25f32; count]);
        let run = |master, addresses: [u64; 5]| {
            let variant = variant(Dtype::BF16, Dtype::BF16, master);
            let mut table = Table::new(variant.operands());
            assert!(table.push(count as u64));
            table.set_addresses(0, &addresses);
            // SAFETY: the vectors outlive the call and hold `count` elements of the variant's types.
            unsafe { adam(&table, variant, &header()) };
        };
        let address = |pointer: *const u8| pointer as u64;
        for _ in 0..3 {
            run(
                Master::F32,
                [
                    address(grad.as_ptr().cast()),
                    address(rounded.as_mut_ptr().cast()),
                    address(m1.as_mut_ptr().cast()),
                    address(v1.as_mut_ptr().cast()),
                    address(master.as_mut_ptr().cast()),
                ],
            );
            run(
                Master::Remainder,
                [
                    address(grad.as_ptr().cast()),
                    address(high.as_mut_ptr().cast()),
                    address(m2.as_mut_ptr().cast()),
                    address(v2.as_mut_ptr().cast()),
                    address(low.as_mut_ptr().cast()),
                ],
            );
        }
        let merged: Vec<u32> = high.iter().zip(&low).map(|(&h, &l)| merge_remainder(h, l).to_bits()).collect();
        assert_eq!(merged, master.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        assert_eq!(m1, m2);
        assert_eq!(v1, v2);
        assert_ne!(m1[count - 1], 0.25, "the last element was not updated");
        assert!(rounded.iter().zip(&master).all(|(r, &x)| *r == bf16::from_f32(x)));
    }

    #[test]
    fn a_tensor_without_a_gradient_is_left_alone() {
        let mut param = values(10, 3);
        let before = param.clone();
        let variant = variant(Dtype::F32, Dtype::F32, Master::None);
        let mut table = Table::new(variant.operands());
        assert!(table.push(10));
        let address = param.as_mut_ptr() as u64;
        table.set_addresses(0, &[0, address, address, address]);
        // SAFETY: no tensor has a gradient, so no address is used.
        unsafe { adam(&table, variant, &header()) };
        assert_eq!(param, before);
    }
}
