//! UNSAFE: hints to the processor. Reading a thousand tensors follows chains of pointers through memory that a forward
//! and backward pass have pushed out of the caches; asking for the next parameters' memory while one is read hides
//! most of the waiting. Invariant: addresses noted in one step are only ever hints in the next, never read through; what is
//! read through belongs to tensors that are held.

use std::ops::Range;

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

/// Where a parameter's notes begin, the kind of its gradient, and what its tensors came to.
#[derive(Clone, Copy, Debug)]
struct Parameter {
    tensors: usize,
    dicts: usize,
    grad: u32,
    checked: Option<Checked>,
}

/// What a parameter's tensors came to when they were last checked.
#[derive(Clone, Copy, Debug)]
pub struct Checked {
    /// Kind of work; none without elements.
    pub signature: Signature,
    /// Whether parameter and states are DTensors, and whether the gradient is one.
    pub sharded: bool,
    pub grad_sharded: bool,
}

/// What one reading of a group noted, one parameter after the other, so that the processor sees it coming.
#[derive(Debug, Default)]
struct Notes {
    tensors: Vec<Note>,
    /// Of each dict: the object that it is an attribute of, or 0, the dict, and the table of its entries.
    dicts: Vec<[u64; 3]>,
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
        self.now.parameters.push(Parameter { tensors, dicts, grad: UNKNOWN, checked: None });
        self.next = self.before.parameters.get(index).map_or(usize::MAX, |before| before.tensors);
    }

    /// What a parameter's tensors, each of the kind noted, came to when they were last checked.
    pub fn checked(&self, index: usize) -> Option<Checked> {
        self.before.parameters.get(index)?.checked
    }

    /// Whether any parameter's were.
    pub fn any_checked(&self) -> bool {
        self.before.parameters.iter().any(|parameter| parameter.checked.is_some())
    }

    /// The kinds that a parameter's tensors were of, in the order in which they were noted.
    pub fn kinds(&self, index: usize) -> impl Iterator<Item = u32> {
        self.before.tensors[self.before.range(index).0].iter().map(|note| note.kind)
    }

    /// Notes that a parameter's dicts are these live ones now, each with the object that it is an attribute of or 0.
    pub fn note_dicts_anew(&mut self, index: usize, dicts: impl Iterator<Item = [u64; 2]>) {
        let (_, noted) = self.before.range(index);
        for (note, dict) in self.before.dicts[noted].iter_mut().zip(dicts) {
            *note = dict_note(dict);
        }
    }

    /// All that was noted holds again if it holds for every parameter; says whether it does.
    pub fn keep_all_if(&mut self, holds: &[bool]) -> bool {
        let all = self.before.parameters.len() == holds.len() && holds.iter().all(|&holds| holds);
        if all {
            std::mem::swap(&mut self.before, &mut self.now);
        }
        all
    }

    /// All that was noted of this parameter holds again.
    pub fn keep(&mut self) {
        let Some(index) = self.now.parameters.len().checked_sub(1) else { return };
        let (tensors, dicts) = self.before.range(index);
        self.now.tensors.extend_from_slice(&self.before.tensors[tensors]);
        self.now.dicts.extend_from_slice(&self.before.dicts[dicts]);
        if let Some(before) = self.before.parameters.get(index) {
            let now = &mut self.now.parameters[index];
            (now.grad, now.checked) = (before.grad, before.checked);
        }
    }

    /// The kind that a parameter's gradient was of.
    pub fn grad_kind(&self, index: usize) -> u32 {
        self.before.parameters.get(index).map_or(UNKNOWN, |parameter| parameter.grad)
    }

    /// Notes the kind of this parameter's gradient.
    pub fn note_grad(&mut self, kind: u32) {
        if let Some(parameter) = self.now.parameters.last_mut() {
            parameter.grad = kind;
        }
    }

    /// Notes what this parameter's tensors come to.
    pub fn note_checked(&mut self, checked: Checked) {
        if let Some(parameter) = self.now.parameters.last_mut() {
            parameter.checked = Some(checked);
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

    /// Notes a live dict and the object that it is an attribute of, or 0.
    pub fn note_dict(&mut self, owner: u64, dict: u64) {
        self.now.dicts.push(dict_note([owner, dict]));
    }

    /// Tensors noted in the last reading.
    pub fn tensors(&self) -> usize {
        self.now.tensors.len()
    }

    /// Asks for the dicts that a parameter had.
    pub fn prefetch_dicts(&self, index: usize) {
        for &[owner, dict, entries] in &self.before.dicts[self.before.range(index).1] {
            if owner != 0 {
                object(owner);
            }
            fetch(dict);
            lines(entries, 3);
        }
    }

    /// Asks for the tensors that a parameter had.
    pub fn prefetch_tensors(&self, index: usize) {
        for &Note { outer, local, shape, storage, .. } in &self.before.tensors[self.before.range(index).0] {
            object(outer);
            if local != outer {
                fetch(local);
            }
            record(shape.saturating_sub(SHAPE));
            fetch(storage + STORAGE_WORDS);
        }
    }
}

impl Notes {
    /// Where a parameter's tensors and dicts are; nowhere if none were noted.
    fn range(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let Some(first) = self.parameters.get(index) else { return (0..0, 0..0) };
        let last = self.parameters.get(index + 1).map(|last| (last.tensors, last.dicts));
        let (tensors, dicts) = last.unwrap_or((self.tensors.len(), self.dicts.len()));
        (first.tensors..tensors, first.dicts..dicts)
    }
}

/// A live dict, an object of six words at least. In CPython 3.10 to 3.14 the fifth points at its keys and the sixth, where
/// the dicts of a class share their keys, at its values.
fn dict_note([owner, dict]: [u64; 2]) -> [u64; 3] {
    // SAFETY: the dict is live.
    let (keys, values) = unsafe { (read(dict + 32), read(dict + 40)) };
    [owner, dict, if values == 0 { keys } else { values }]
}

/// Where a tensor's Python object points at torch's record of it: found by looking, not assumed. Every tensor's object has
/// it at the same place, whatever its class.
#[derive(Clone, Copy, Debug)]
pub struct RecordAt {
    offset: u64,
}

/// End of the words of a tensor's Python object that may point at its record; every tensor's object is longer.
const OBJECT_BYTES: u64 = 40;

impl RecordAt {
    /// Finds the place from one live tensor: its Python object and its record.
    pub fn find(object: u64, record: u64) -> Option<RecordAt> {
        let place = |offset| RecordAt { offset };
        (16..OBJECT_BYTES).step_by(8).map(place).find(|at| at.record(object) == record)
    }

    /// Where that word lies within a tensor's object.
    pub fn offset(self) -> u64 {
        self.offset
    }

    /// Record of a live tensor.
    pub fn record(self, object: u64) -> u64 {
        // SAFETY: the tensor is live, and every tensor's object has this word.
        unsafe { read(object + self.offset) }
    }

    /// Where a live tensor's record points at its storage.
    fn storage(self, object: u64) -> u64 {
        // SAFETY: the tensor is live.
        unsafe { storage(self.record(object)) }
    }
}

/// Where a record points at its tensor's storage.
///
/// # Safety
/// `record` must be that of a live tensor.
pub unsafe fn storage(record: u64) -> u64 {
    // SAFETY: the record of a live tensor has this word, since its shape lies behind.
    unsafe { read(record + 16) }
}

/// Where a live DTensor's object, of so many bytes, points at its local tensor's, found by looking.
pub fn slot(outer: u64, bytes: u64, local: u64) -> Option<u64> {
    // SAFETY: the words lie within the object.
    (16..bytes & !7).step_by(8).find(|&offset| unsafe { read(outer + offset) } == local)
}

/// Class of a live Python object.
pub fn class(object: u64) -> u64 {
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
pub const STORAGE_WORDS: u64 = 16;
/// Bytes from the beginning of torch's record of a tensor to its shape, about; and to the last word that is read.
const SHAPE: u64 = 72;
const RECORD_END: u64 = 184;

/// Asks for torch's record of a tensor.
pub fn record(record: u64) {
    lines(record, 3);
    fetch(record + RECORD_END);
}

/// Asks for a number of lines.
pub fn lines(address: u64, count: u64) {
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
