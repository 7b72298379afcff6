//! UNSAFE: hints to the processor. Reading a thousand tensors follows chains of pointers through memory that a forward
//! and backward pass have pushed out of the caches; asking for the next parameters' memory while one is read hides
//! most of the waiting. Invariant: addresses noted in one step are only ever hints in the next, never read through.

/// How many parameters ahead memory is asked for.
pub const AHEAD: usize = 6;

/// Where one parameter's Python objects and torch's records of them lay when they were last read: for parameter,
/// exp_avg, exp_avg_sq and master the outer and the local object and the local tensor's shape; the state's dict; and the
/// shape of the gradient, whose place an allocator that runs the same loop often gives out again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trail {
    tensors: [[u64; 3]; 4],
    state: u64,
    grad: u64,
}

impl Trail {
    /// Notes the objects of one tensor.
    pub fn note(&mut self, tensor: usize, outer: u64, local: u64, shape: u64) {
        self.tensors[tensor] = [outer, local, shape];
    }

    /// Notes the dict of states.
    pub fn note_state(&mut self, state: u64) {
        self.state = state;
    }

    /// Notes the gradient's shape.
    pub fn note_grad(&mut self, shape: u64) {
        self.grad = shape;
    }

    /// Asks for all of it.
    pub fn prefetch(&self) {
        fetch(self.state);
        record(self.grad);
        for &[outer, local, shape] in self.tensors.iter().filter(|tensor| tensor[0] != 0) {
            object(outer);
            if local != outer {
                object(local);
            }
            record(shape);
        }
    }
}

/// Asks for a Python object.
pub fn object(address: u64) {
    fetch(address);
    fetch(address + LINE);
}

/// Asks for torch's record of a tensor, which begins before its shape and ends behind it.
fn record(shape: u64) {
    if shape > LINE {
        fetch(shape - LINE);
        fetch(shape);
        fetch(shape + LINE);
    }
}

const LINE: u64 = 64;

#[cfg(target_arch = "x86_64")]
fn fetch(address: u64) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a prefetch reads nothing and faults on no address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address as *const i8) };
}

#[cfg(target_arch = "aarch64")]
fn fetch(address: u64) {
    // SAFETY: a prefetch reads nothing and faults on no address.
    unsafe { std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn fetch(_: u64) {}
