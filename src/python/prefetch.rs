//! UNSAFE: hints to the processor. Reading a thousand tensors follows chains of pointers through memory that a forward
//! and backward pass have pushed out of the caches; asking for the next parameters' memory while one is read hides
//! most of the waiting. Invariant: addresses noted in one step are only ever hints in the next, never read through; what is
//! read through belongs to tensors that are held.

use crate::plan::column::Signature;
use crate::python::recall::UNKNOWN;

/// How many parameters ahead memory is asked for.
pub const AHEAD: usize = 6;

/// Where the Python objects of one group's parameters, and torch's records of them, lay when they were last read.
#[derive(Debug, Default)]
pub struct Trails {
    before: Notes,
    now: Notes,
    /// The tensor among those before that the next one will be like.
    next: usize,
}

/// Where a tensor lay and what kind it was.
#[derive(Clone, Copy, Debug)]
struct Note {
    outer: u64,
    local: u64,
    shape: u64,
    storage: u64,
    kind: u32,
}

/// Where a parameter's notes begin, and what its tensors came to.
#[derive(Clone, Copy, Debug)]
struct Parameter {
    tensors: usize,
    dicts: usize,
    checked: Option<Signature>,
}

/// What one reading of a group noted, one parameter after the other, so that the processor sees it coming.
#[derive(Debug, Default)]
struct Notes {
    tensors: Vec<Note>,
    /// Of each dict: the object and the table of its keys.
    dicts: Vec<[u64; 2]>,
    /// One of each parameter.
    parameters: Vec<Parameter>,
}

impl Trails {
    /// A reading begins: what the last one noted is followed, and noted anew.
    pub fn begin(&mut self) {
        std::mem::swap(&mut self.before, &mut self.now);
        self.now.tensors.clear();
        self.now.dicts.clear();
        self.now.parameters.clear();
    }

    /// Nothing that was checked holds any longer.
    pub fn forget_checks(&mut self) {
        self.now.parameters.iter_mut().for_each(|parameter| parameter.checked = None);
    }

    /// The next parameter's objects follow.
    pub fn begin_parameter(&mut self) {
        let index = self.now.parameters.len();
        let (tensors, dicts) = (self.now.tensors.len(), self.now.dicts.len());
        self.now.parameters.push(Parameter { tensors, dicts, checked: None });
        self.next = self.before.parameters.get(index).map_or(usize::MAX, |before| before.tensors);
    }

    /// Drops what was noted of this parameter.
    pub fn begin_parameter_again(&mut self) {
        if let Some(Parameter { tensors, dicts, .. }) = self.now.parameters.pop() {
            self.now.tensors.truncate(tensors);
            self.now.dicts.truncate(dicts);
        }
        self.begin_parameter();
    }

    /// What this parameter's tensors, each of the kind noted, came to when they were last checked.
    pub fn checked(&self) -> Option<Signature> {
        self.before.parameters.get(self.now.parameters.len().checked_sub(1)?)?.checked
    }

    /// Notes what this parameter's tensors come to.
    pub fn note_checked(&mut self, signature: Signature) {
        if let Some(parameter) = self.now.parameters.last_mut() {
            parameter.checked = Some(signature);
        }
    }

    /// The kind that the next tensor to be noted was of.
    pub fn kind(&self) -> u32 {
        self.before.tensors.get(self.next).map_or(UNKNOWN, |note| note.kind)
    }

    /// Notes the objects of one live tensor and its kind.
    pub fn note(&mut self, outer: u64, local: u64, shape: u64, at: Option<RecordAt>, kind: u32) {
        self.next = self.next.wrapping_add(1);
        self.now.tensors.push(Note { outer, local, shape, storage: at.map_or(0, |at| at.storage(local)), kind });
    }

    /// Notes a live dict, an object of at least six words. The fifth points at its keys in CPython 3.10 to 3.13.
    pub fn note_dict(&mut self, dict: u64) {
        // SAFETY: the dict is live.
        self.now.dicts.push([dict, unsafe { read(dict + 32) }]);
    }

    /// Tensors noted in the last reading.
    pub fn tensors(&self) -> usize {
        self.now.tensors.len()
    }

    /// Asks for all that a parameter had.
    pub fn prefetch(&self, index: usize) {
        let Notes { tensors, dicts, parameters } = &self.before;
        let Some(first) = parameters.get(index) else { return };
        let end = Parameter { tensors: tensors.len(), dicts: dicts.len(), checked: None };
        let last = parameters.get(index + 1).unwrap_or(&end);
        for &[dict, keys] in &dicts[first.dicts..last.dicts] {
            fetch(dict);
            lines(keys, 3);
        }
        for &Note { outer, local, shape, storage, .. } in &tensors[first.tensors..last.tensors] {
            object(outer);
            if local != outer {
                fetch(local);
            }
            record(shape);
            fetch(storage + STORAGE_WORDS);
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
        let place = |offset| RecordAt { offset };
        (16..OBJECT_BYTES).step_by(8).map(place).find(|at| at.is_right(object, shape))
    }

    /// Where that word lies within a tensor's object.
    pub fn offset(self) -> u64 {
        self.offset
    }

    /// Whether the word of a live tensor's object points just before its shape.
    pub fn is_right(self, object: u64, shape: u64) -> bool {
        let word = self.record(object);
        word < shape && (RECORD_BYTES..256).contains(&(shape - word))
    }

    /// Record of a live tensor.
    pub fn record(self, object: u64) -> u64 {
        // SAFETY: the tensor is live, and every tensor's object has this word.
        unsafe { read(object + self.offset) }
    }

    /// Where a live tensor's record points at its storage.
    fn storage(self, object: u64) -> u64 {
        // SAFETY: the record of a live tensor has `RECORD_BYTES`, since its shape lies behind.
        unsafe { read(self.record(object) + 16) }
    }

    /// Asks for the record of a live tensor, whose object should have arrived.
    pub fn fetch_record(self, object: u64) {
        record(self.record(object) + SHAPE);
    }

    /// Asks for what the record of a live tensor points at first: its storage and its gradient's place.
    pub fn fetch_behind(self, object: u64) {
        // SAFETY: as for `storage`.
        let (storage, meta) = unsafe { (read(self.record(object) + 16), read(self.record(object) + 24)) };
        lines(storage, 2);
        lines(meta, 2);
    }
}

/// The way from a parameter's record to its gradient's Python object, and from a DTensor's to its local tensor's: found
/// by looking at one of each.
#[derive(Clone, Copy, Debug, Default)]
pub struct Chain {
    /// In what the record's fourth word points at: the gradient's record.
    grad: Option<u64>,
    /// In a record: its tensor's Python object.
    object: Option<u64>,
    /// In a DTensor's object, and which class that is: its local tensor's.
    local: Option<(u64, u64)>,
}

impl Chain {
    /// Looks at a live parameter, its gradient, and that gradient's local tensor.
    pub fn find(at: RecordAt, param: u64, grad: u64, local: u64) -> Chain {
        // SAFETY: as for `RecordAt::storage`; what lies there is torch's record of autograd, live and of 96 bytes at least.
        let meta = unsafe { read(at.record(param) + 24) };
        let grad_record = at.record(grad);
        let search = |base: u64, range: std::ops::Range<u64>, wanted: u64| {
            // SAFETY: records and DTensor's objects, which have two words of their own, are at least as long.
            (base != 0).then(|| range.step_by(8).find(|&offset| unsafe { read(base + offset) } == wanted)).flatten()
        };
        Chain {
            grad: search(meta, 8..96, grad_record),
            object: search(grad_record, 16..RECORD_BYTES + 40, grad),
            local: (local != grad)
                .then(|| search(grad, OBJECT_BYTES - 8..OBJECT_BYTES + 16, local))
                .flatten()
                .map(|offset| (offset, class(grad))),
        }
    }

    /// Record of a live parameter's gradient; 0 without.
    fn grad_record(self, at: RecordAt, param: u64) -> u64 {
        // SAFETY: as in `find`.
        let meta = unsafe { read(at.record(param) + 24) };
        // SAFETY: as in `find`.
        self.grad.filter(|_| meta != 0).map_or(0, |offset| unsafe { read(meta + offset) })
    }

    /// Asks for the record of a live parameter's gradient.
    pub fn fetch_grad_record(self, at: RecordAt, param: u64) {
        fetch(self.grad_record(at, param));
    }

    /// Asks for the Python object of a live parameter's gradient, whose record should have arrived.
    pub fn fetch_grad(self, at: RecordAt, param: u64) {
        let record = self.grad_record(at, param);
        if let (Some(offset), true) = (self.object, record != 0) {
            // SAFETY: the gradient is live as long as its parameter holds it.
            object(unsafe { read(record + offset) });
        }
    }

    /// Asks for the local tensor of a live DTensor, whose object should have arrived.
    pub fn fetch_local(self, outer: u64) {
        if let Some((offset, _)) = self.local.filter(|&(_, known)| known == class(outer)) {
            // SAFETY: the DTensor is live, and objects of its class have this word.
            object(unsafe { read(outer + offset) });
        }
    }
}

/// Class of a live Python object.
fn class(object: u64) -> u64 {
    // SAFETY: every object's second word is its class.
    unsafe { read(object + 8) }
}

/// A word of live memory.
///
/// # Safety
/// Eight bytes at `address` must be readable.
pub unsafe fn read(address: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { (address as *const u64).read_unaligned() }
}

/// Asks for a Python object.
pub fn object(address: u64) {
    fetch(address);
    fetch(address + OBJECT_BYTES);
}

/// Where a storage has the words that are read.
const STORAGE_WORDS: u64 = 16;
/// Bytes from the beginning of torch's record of a tensor to its shape, about; and to the last word that is read.
const SHAPE: u64 = 72;
const RECORD_END: u64 = 184;

/// Asks for torch's record of a tensor, which begins before its shape and ends behind it.
fn record(shape: u64) {
    if shape > SHAPE {
        lines(shape - SHAPE, 3);
        fetch(shape - SHAPE + RECORD_END);
    }
}

/// Asks for a number of lines.
fn lines(address: u64, count: u64) {
    (0..count).for_each(|line| fetch(address + line * LINE));
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
