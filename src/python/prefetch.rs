//! UNSAFE: hints to the processor. Reading a thousand tensors follows chains of pointers through memory that a forward
//! and backward pass have pushed out of the caches; asking for the next parameters' memory while one is read hides
//! most of the waiting. Invariant: addresses noted in one step are only ever hints in the next, never read through; what is
//! read through belongs to tensors that are held.

/// How many parameters ahead memory is asked for.
pub const AHEAD: usize = 6;

/// Where one parameter's Python objects and torch's records of them lay when they were last read: for parameter,
/// exp_avg, exp_avg_sq and master the outer and the local object, the local tensor's shape and its storage; and the
/// state's dict.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trail {
    tensors: [[u64; 4]; 4],
    state: u64,
}

impl Trail {
    /// Notes the objects of one tensor.
    pub fn note(&mut self, tensor: usize, outer: u64, local: u64, shape: u64, at: Option<RecordAt>) {
        self.tensors[tensor] = [outer, local, shape, at.map_or(0, |at| at.storage(local))];
    }

    /// Notes the dict of states.
    pub fn note_state(&mut self, state: u64) {
        self.state = state;
    }

    /// Asks for all of it.
    pub fn prefetch(&self) {
        fetch(self.state);
        for &[outer, local, shape, storage] in self.tensors.iter().filter(|tensor| tensor[0] != 0) {
            object(outer);
            if local != outer {
                object(local);
            }
            record(shape);
            fetch(storage);
        }
    }
}

/// Where a tensor's Python object points at torch's record of it: found by looking, not assumed. Every tensor's object has
/// it at the same place, whatever its class.
#[derive(Clone, Copy, Debug)]
pub struct RecordAt {
    offset: u64,
}

/// End of the words of a tensor's Python object that may point at its record; every tensor's object is longer.
const OBJECT_BYTES: u64 = 40;
/// Bytes of a record, at least, that lie before the shape.
const RECORD_BYTES: u64 = 32;

impl RecordAt {
    /// Finds the place from one live tensor: `object` is its Python object, `shape` lies within its record.
    pub fn find(object: u64, shape: u64) -> Option<RecordAt> {
        let points_before_shape = |&offset: &u64| {
            // SAFETY: within the words that every tensor's object has.
            let word = unsafe { read(object + offset) };
            word < shape && (RECORD_BYTES..256).contains(&(shape - word))
        };
        (16..OBJECT_BYTES).step_by(8).find(points_before_shape).map(|offset| RecordAt { offset })
    }

    /// Where a live tensor's record points at its storage.
    fn storage(self, object: u64) -> u64 {
        // SAFETY: the tensor is live, its object has the first word, and its record, whose shape lies behind, the second.
        unsafe { read(read(object + self.offset) + 16) }
    }

    /// Asks for the record of a live tensor, whose object should have arrived.
    pub fn fetch_record(self, object: u64) {
        // SAFETY: the tensor is live, and its object has this word.
        let record = unsafe { read(object + self.offset) };
        fetch(record);
        fetch(record + LINE);
        fetch(record + 2 * LINE);
    }

    /// Asks for what the record of a live tensor points at first: its storage and its gradient's place.
    pub fn fetch_behind(self, object: u64) {
        // SAFETY: as above; and the record, live as its tensor, has at least `RECORD_BYTES`, since its shape lies behind.
        unsafe {
            let record = read(object + self.offset);
            fetch(read(record + 16));
            fetch(read(record + 24));
        }
    }
}

/// A word of live memory.
///
/// # Safety
/// Eight bytes at `address` must be readable.
unsafe fn read(address: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { (address as *const u64).read_unaligned() }
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
