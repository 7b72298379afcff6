//! UNSAFE: copies tensors in host memory from one storage to another. The rules are those of
//! `kernels/cast.cu`. Invariant: a block writes only the elements of its own chunk.

use crate::cpu::arithmetic::BLOCK;
use crate::cpu::kernels::{load, store};
use crate::cpu::scaling::{self, Found};
use crate::loader::Copy;
use crate::plan::column::Role;
use crate::plan::operands::Scaled;
use crate::plan::table::CHUNK;
use crate::tensor::Dtype;
use crate::threads::KERNELS;

/// Makes copies, one tensor after the other.
///
/// # Safety
/// Every address of a copy must be that of `numel` elements of its types or, for scaling, of one fp32 element, valid
/// for the call; what is written is touched by nothing else meanwhile.
pub unsafe fn cast(copies: &[Copy]) {
    for copy in copies {
        // SAFETY: the caller's promise.
        unsafe {
            if copy.cast.source == Dtype::I16 {
                verbatim(copy);
                continue;
            }
            let read = if copy.cast.read { scaling::get(copy.read) } else { 1.0 };
            let mut write = 1.0;
            if copy.cast.two_passes() {
                let found = Found::default();
                // Which role it is found for does not matter.
                blocks(copy, read, |_, values| found.raise(Role::ExpAvg, values));
                let state = copy.cast.write == Scaled::State;
                write = scaling::put_factor(state, &copy.scaling, &found, Role::ExpAvg);
            }
            blocks(copy, read, |start, values| store(copy.cast.target, copy.target, start, write, values));
        }
    }
}

unsafe fn verbatim(copy: &Copy) {
    let work = |(): &mut (), chunk| {
        let (start, end) = (chunk * CHUNK, copy.numel.min((chunk + 1) * CHUNK));
        // SAFETY: the caller's promise; source and target are different buffers.
        unsafe {
            let (source, target) = (copy.source as *const u16, copy.target as *mut u16);
            let (start, count) = (start as usize, (end - start) as usize);
            std::ptr::copy_nonoverlapping(source.add(start), target.add(start), count);
        }
    };
    KERNELS.each(copy.numel.div_ceil(CHUNK), copy.numel, || (), work);
}

/// Calls `visit(start, values)` with the fp32 values of every block.
///
/// # Safety
/// As for [`cast`].
unsafe fn blocks(copy: &Copy, read: f32, visit: impl Fn(usize, &[f32]) + Sync) {
    let work = |values: &mut [f32; BLOCK], block| {
        let start = block as usize * BLOCK;
        let values = &mut values[..BLOCK.min(copy.numel as usize - start)];
        // SAFETY: the caller's promise.
        unsafe { load(copy.cast.source, copy.source, start, read, values) };
        visit(start, values);
    };
    KERNELS.each(copy.numel.div_ceil(BLOCK as u64), copy.numel, || [0.0; BLOCK], work);
}
