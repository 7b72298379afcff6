//! UNSAFE: knows a tensor by the words of torch's record of it. Most tensors of a step are of a kind that was read before:
//! the same class, shape, strides, dtype and device. If every word of the record but its memory is that of a tensor that
//! was read in full, so is the view; one comparison stands for ten calls into torch.
//! Where those words lie is no interface of torch's: the place is found by looking at probes, and used only if it tells
//! all pairs of probes apart that differ in anything a kernel would notice.
//! Invariant: memory is only read of live tensors, and only where every `torch.Tensor` has it.

use std::collections::HashMap;

use pyo3::prelude::*;

use crate::python::prefetch::{RecordAt, read};
use crate::python::reader::LOW_ADDRESS;
use crate::tensor::{Dtype, View};

/// What tells kinds of tensors apart: the record's class and extras, its words from the number of dimensions to the
/// dispatch keys, and how the storage frees its memory.
type Words = [u64; FROM_SHAPE + 3];

/// Words of a record from the number of dimensions, just before the shape, to its end.
const FROM_SHAPE: usize = 15;
/// Dimensions that a record has room for; more are kept elsewhere.
const DIMENSIONS: u64 = 5;
/// Where, in those words, the offset into the storage lies: behind the number of dimensions, shape and strides.
const OFFSET: usize = 1 + 2 * DIMENSIONS as usize;
/// Where a record points at its storage and at its extras.
const STORAGE: u64 = 16;
const EXTRAS: u64 = 32;
/// Where a storage has its address, and behind it the function that frees it.
const ADDRESS: u64 = 16;

/// Where the words lie, in this process's torch.
#[derive(Clone, Copy, Debug)]
pub struct Recall {
    at: RecordAt,
    /// The shape, in a record.
    shape: u64,
}

/// The words of one tensor.
struct Reading {
    words: Words,
    /// Elements from the beginning of the storage, and where that is.
    offset: u64,
    storage: u64,
    /// Address of the shape.
    shape: u64,
}

impl Recall {
    /// The places, if all probes have them. `views` are those of the probes as torch tells them; `strangers` are unlike
    /// each of them in something that a view does not say.
    pub fn find(probes: &[Bound<'_, PyAny>], views: &[View], strangers: &[Bound<'_, PyAny>]) -> Option<Recall> {
        let (first, view) = (probes.first()?, views.first()?);
        let at = RecordAt::find(first.as_ptr() as u64, view.record)?;
        let recall = Recall { at, shape: view.record - at.record(first.as_ptr() as u64) };
        let known: Vec<(Option<Reading>, &View)> =
            probes.iter().zip(views).map(|(probe, view)| (recall.read(probe), view)).collect();
        if known.iter().filter(|(reading, _)| reading.is_some()).count() < views.len() / 2 {
            return None;
        }
        let right = |(reading, view): &(Option<Reading>, &View)| {
            reading.as_ref().is_none_or(|reading| reading.shape == view.record && reading.of(view) == **view)
        };
        let told_apart = known.iter().enumerate().all(|(index, (one, view))| {
            known[..index].iter().all(|(other, other_view)| {
                let (Some(one), Some(other)) = (one, other) else { return true };
                let alike = View { address: 0, record: 0, ..**view } == View { address: 0, record: 0, ..**other_view };
                alike || one.words != other.words
            })
        });
        let strange = strangers.iter().filter_map(|stranger| recall.read(stranger)).all(|stranger| {
            known.iter().all(|(reading, _)| reading.as_ref().is_none_or(|reading| reading.words != stranger.words))
        });
        (known.iter().all(right) && told_apart && strange).then_some(recall)
    }

    /// The words of a live `torch.Tensor`; `None` if it has no storage or its shape is not within the record.
    fn read(&self, tensor: &Bound<'_, PyAny>) -> Option<Reading> {
        let record = self.at.record(tensor.as_ptr() as u64);
        let first = record + self.shape - 8;
        // SAFETY: the tensor is live, and so are its record and storage, which have these words: a record ends
        // behind its dispatch keys, `FROM_SHAPE` words from the number of dimensions.
        unsafe {
            let storage = read(record + STORAGE);
            if storage == 0 || read(first) > DIMENSIONS {
                return None;
            }
            let mut words: Words = [0; FROM_SHAPE + 3];
            for (at, word) in words[..FROM_SHAPE].iter_mut().enumerate() {
                *word = read(first + 8 * at as u64);
            }
            let offset = std::mem::take(&mut words[OFFSET]);
            words[FROM_SHAPE] = read(record);
            words[FROM_SHAPE + 1] = read(record + EXTRAS);
            words[FROM_SHAPE + 2] = read(storage + ADDRESS + 8);
            Some(Reading { words, offset, storage: read(storage + ADDRESS), shape: first + 8 })
        }
    }
}

impl Reading {
    /// The view of a tensor of this kind.
    fn of(&self, kind: &View) -> View {
        let bytes = self.offset.wrapping_mul(kind.dtype.bytes());
        let address = if kind.numel == 0 { 0 } else { self.storage.wrapping_add(bytes) };
        View { address, record: self.shape, ..*kind }
    }
}

/// Kinds of tensors that were read in full, each with the view of one.
#[derive(Debug, Default)]
pub struct Kinds {
    kinds: Vec<(Words, View)>,
    numbers: HashMap<Words, u32>,
}

/// No kind.
pub const UNKNOWN: u32 = u32::MAX;

impl Kinds {
    /// The view of a live tensor if it is of the kind of this number.
    pub fn view(&self, recall: &Recall, number: u32, tensor: &Bound<'_, PyAny>) -> Option<View> {
        let (words, kind) = self.kinds.get(number as usize)?;
        let reading = recall.read(tensor)?;
        // At a low address its memory may have been released, which torch tells better.
        let mapped = |view: &View| view.numel == 0 || view.address >= LOW_ADDRESS;
        (reading.words == *words).then(|| reading.of(kind)).filter(mapped)
    }

    /// Number of the kind of a live tensor that was read in full.
    pub fn learn(&mut self, recall: &Recall, tensor: &Bound<'_, PyAny>, view: &View) -> u32 {
        // The bytes of other elements are not known, so neither are addresses behind an offset.
        if view.dtype == Dtype::Other {
            return UNKNOWN;
        }
        let Some(reading) = recall.read(tensor) else { return UNKNOWN };
        if reading.of(view) != *view {
            return UNKNOWN;
        }
        let kinds = &mut self.kinds;
        *self.numbers.entry(reading.words).or_insert_with(|| {
            kinds.push((reading.words, *view));
            kinds.len() as u32 - 1
        })
    }

    /// Forgets all kinds if there are more than `tensors` can be of, as after many changes of shape; says whether it did.
    /// Numbers then mean other kinds.
    pub fn keep_within(&mut self, tensors: usize) -> bool {
        let crowded = self.kinds.len() > tensors;
        if crowded {
            self.kinds.clear();
            self.numbers.clear();
        }
        crowded
    }
}
