//! UNSAFE: runs a table on host memory with rayon. The one place that makes slices from tensors' addresses.
//! Invariant: a block reads and writes only the elements of its own chunk.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use rayon::prelude::*;

use crate::cpu::arithmetic::{BLOCK, adam_update, merge_remainder, split_remainder};
use crate::options::{Header, Live, Scalars};
use crate::plan::column::{Master, Variant};
use crate::plan::table::{CHUNK, Table};
use crate::tensor::Dtype;

/// fp32 gradient, parameter and moments of one block.
struct Scratch([Box<[f32; BLOCK]>; 4]);

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch([(); 4].map(|()| Box::new([0.0; BLOCK])))
    }
}

/// Runs one launch.
///
/// # Safety
/// Every tensor with a gradient must have, at each of its `variant.operands()` addresses, `numel` elements of the
/// variant's type that stay valid for the call; what the update writes is touched by nothing else meanwhile. The live
/// addresses of a capturable launch must be those of one element each.
pub unsafe fn adam(table: &Table, variant: Variant, header: &Header) {
    let mut inv_scale = None;
    let mut scalars = header.scalars;
    if variant.capturable {
        // SAFETY: the caller's promise for the live addresses.
        let (lr, step, scale, skip) = unsafe { read_live(&header.live) };
        if skip == 1 {
            return;
        }
        inv_scale = Some(scale);
        scalars = scalars.with_live(lr, header.bias_correction.then_some(step));
    }
    let scalars = &scalars;
    let chunks: Vec<(usize, u64)> = (0..table.len())
        .filter(|&tensor| table.addresses(tensor)[0] != 0)
        .flat_map(|tensor| (0..table.numel(tensor).div_ceil(CHUNK)).map(move |chunk| (tensor, chunk)))
        .collect();
    chunks.into_par_iter().for_each_init(Scratch::default, |scratch, (tensor, chunk)| {
        let end = table.numel(tensor).min((chunk + 1) * CHUNK);
        let mut start = chunk * CHUNK;
        while start < end {
            let count = (end - start).min(BLOCK as u64);
            // SAFETY: the elements lie within the tensors by the caller's promise, and no other chunk has them.
            unsafe {
                block(table.addresses(tensor), start as usize, count as usize, variant, scalars, inv_scale, scratch)
            };
            start += count;
        }
    });
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

/// Updates `count` elements from `start`.
///
/// # Safety
/// As for [`adam`], for these elements.
unsafe fn block(
    addresses: &[u64; 5],
    start: usize,
    count: usize,
    variant: Variant,
    scalars: &Scalars,
    inv_scale: Option<f32>,
    scratch: &mut Scratch,
) {
    let [g, p, m, v] = scratch.0.each_mut().map(|buffer| &mut buffer[..count]);
    let [grad, param, exp_avg, exp_avg_sq, master] = *addresses;
    // SAFETY: by the caller's promise these addresses hold `start + count` elements of these types.
    unsafe {
        load(variant.grad, grad, start, g);
        load(variant.moment, exp_avg, start, m);
        load(variant.moment, exp_avg_sq, start, v);
        match variant.master {
            Master::None => load(variant.param, param, start, p),
            Master::F32 => load(Dtype::F32, master, start, p),
            Master::Remainder => {
                let (high, low) = (elements::<u16>(param, start, count), elements::<u16>(master, start, count));
                for ((p, &high), &low) in p.iter_mut().zip(high.iter()).zip(low.iter()) {
                    *p = merge_remainder(high, low);
                }
            }
        }
    }
    if let Some(inv_scale) = inv_scale {
        g.iter_mut().for_each(|g| *g *= inv_scale);
        // SAFETY: as above; a capturable step writes its gradients.
        unsafe { store(variant.grad, grad, start, g) };
    }
    adam_update(scalars, variant.capturable, g, p, m, v);
    // SAFETY: as above.
    unsafe {
        store(variant.moment, exp_avg, start, m);
        store(variant.moment, exp_avg_sq, start, v);
        match variant.master {
            Master::None => store(variant.param, param, start, p),
            Master::F32 => {
                store(Dtype::F32, master, start, p);
                store(variant.param, param, start, p);
            }
            Master::Remainder => {
                let (high, low) = (elements::<u16>(param, start, count), elements::<u16>(master, start, count));
                for ((high, low), &p) in high.iter_mut().zip(low.iter_mut()).zip(p.iter()) {
                    (*high, *low) = split_remainder(p);
                }
            }
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

/// Widens elements to fp32.
///
/// # Safety
/// As for [`elements`].
unsafe fn load(dtype: Dtype, address: u64, start: usize, out: &mut [f32]) {
    let count = out.len();
    // SAFETY: the caller's promise. Gradients may be shared between tensors, so they are only ever read: no `&mut`
    // to them is made.
    unsafe {
        match dtype {
            Dtype::BF16 => {
                let source = std::slice::from_raw_parts((address as *const bf16).add(start), count);
                source.convert_to_f32_slice(out);
            }
            Dtype::F16 => {
                let source = std::slice::from_raw_parts((address as *const f16).add(start), count);
                source.convert_to_f32_slice(out);
            }
            _ => out.copy_from_slice(std::slice::from_raw_parts((address as *const f32).add(start), count)),
        }
    }
}

/// Rounds fp32 to nearest even and stores.
///
/// # Safety
/// As for [`elements`].
unsafe fn store(dtype: Dtype, address: u64, start: usize, values: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            Dtype::BF16 => {
                elements::<u16>(address, start, values.len())
                    .reinterpret_cast_mut::<bf16>()
                    .convert_from_f32_slice(values);
            }
            Dtype::F16 => {
                elements::<u16>(address, start, values.len())
                    .reinterpret_cast_mut::<f16>()
                    .convert_from_f32_slice(values);
            }
            _ => elements::<f32>(address, start, values.len()).copy_from_slice(values),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;

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
        let run = |master, addresses| {
            let mut table = Table::default();
            assert!(table.push(count as u64));
            table.set_addresses(0, addresses);
            let variant =
                Variant { grad: Dtype::BF16, param: Dtype::BF16, moment: Dtype::F32, master, capturable: false };
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
        let mut table = Table::default();
        assert!(table.push(10));
        let address = param.as_mut_ptr() as u64;
        table.set_addresses(0, [0, address, address, address, 0]);
        let variant = Variant {
            grad: Dtype::F32,
            param: Dtype::F32,
            moment: Dtype::F32,
            master: Master::None,
            capturable: false,
        };
        // SAFETY: no tensor has a gradient, so no address is used.
        unsafe { adam(&table, variant, &header()) };
        assert_eq!(param, before);
    }
}
