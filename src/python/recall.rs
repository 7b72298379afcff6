//! UNSAFE: knows a tensor by the words of torch's record of it. Most tensors of a step are of a kind that was read before:
//! the same class, shape, strides, dtype and device. If every word of the record but its memory is that of a tensor that
//! was read in full, so is the view; one comparison stands for ten calls into torch.
//! Where those words lie is no interface of torch's: the place is found by looking at probes, and used only if it tells
//! all pairs of probes apart that differ in anything a kernel would notice.
//! Invariant: memory is only read of live tensors, and only where every `torch.Tensor` has it.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::prelude::*;

use crate::python::prefetch::{RecordAt, read};
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
/// Where in a record the shape may be.
const SHAPE_WITHIN: std::ops::Range<u64> = 32..256;
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
    grads: Option<GradAt>,
}

/// The way from a parameter's record to its gradient's, and from a record to its tensor's Python object.
#[derive(Clone, Copy, Debug)]
pub struct GradAt {
    /// The gradient's record, in torch's record of autograd.
    grad: u64,
    /// What lies there without a gradient.
    none: u64,
    /// The Python object, in a record.
    object: u64,
}

/// Where a record points at torch's record of autograd; 0 without.
const AUTOGRAD: u64 = 24;
/// Bytes of a record of autograd, at least.
const AUTOGRAD_BYTES: u64 = 96;
/// End of the words of a record that may point at its Python object.
const OBJECT_END: u64 = 72;

impl GradAt {
    /// Looks at live parameters with gradients and at some without.
    pub fn find(at: RecordAt, graded: &[[u64; 2]], bare: &[u64]) -> Option<GradAt> {
        // SAFETY: the tensors are live, and so are their records, which are at least as long.
        unsafe {
            let autograd = |param: u64| read(at.record(param) + AUTOGRAD);
            let params = || graded.iter().map(|[param, _]| param).chain(bare);
            if graded.is_empty() || params().any(|&param| autograd(param) == 0) {
                return None;
            }
            let leads = |&offset: &u64| graded.iter().all(|&[p, grad]| read(autograd(p) + offset) == at.record(grad));
            let grad = (8..AUTOGRAD_BYTES).step_by(8).find(leads)?;
            let none = read(autograd(*bare.first()?) + grad);
            let points = |&offset: &u64| graded.iter().all(|&[_, grad]| read(at.record(grad) + offset) == grad);
            let object = (STORAGE..OBJECT_END).step_by(8).find(points)?;
            let alike = bare.iter().all(|&param| read(autograd(param) + grad) == none);
            let apart = graded.iter().all(|&[_, grad]| at.record(grad) != none);
            (alike && apart).then_some(GradAt { grad, none, object })
        }
    }

    /// A live parameter's record of autograd; 0 without.
    ///
    /// # Safety
    /// `record` must be that of a live tensor.
    pub unsafe fn autograd(record: u64) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { read(record + AUTOGRAD) }
    }

    /// The gradient's record; 0 without a gradient.
    ///
    /// # Safety
    /// `autograd` must be 0 or a live tensor's record of autograd.
    pub unsafe fn record(self, autograd: u64) -> u64 {
        // SAFETY: the caller's promise.
        let grad = if autograd == 0 { 0 } else { unsafe { read(autograd + self.grad) } };
        if grad == self.none { 0 } else { grad }
    }

    /// The Python object of a tensor; 0 without.
    ///
    /// # Safety
    /// `record` must be that of a live tensor.
    pub unsafe fn object(self, record: u64) -> u64 {
        // SAFETY: the caller's promise.
        let word = unsafe { read(record + self.object) };
        // Before 2.10, torch marks there objects that only the tensor keeps alive.
        word & !1
    }
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
    /// The places, if all probes have them, whose records are `at` that place. `views` are those of the probes as torch
    /// tells them; `strangers` are unlike each of them in something that a view does not say.
    pub fn find(
        at: RecordAt,
        probes: &[Bound<'_, PyAny>],
        views: &[View],
        strangers: &[Bound<'_, PyAny>],
        grads: Option<GradAt>,
    ) -> Option<Recall> {
        let (first, view) = (probes.first()?, views.first()?);
        // Few dimensions are kept in the record, behind what is read of it.
        let shape = view.record.checked_sub(at.record(first.as_ptr() as u64))?;
        if !SHAPE_WITHIN.contains(&shape) {
            return None;
        }
        let recall = Recall { at, shape, grads };
        // SAFETY: the tensor is live.
        let look = |tensor: &Bound<'_, PyAny>| unsafe { recall.read(at.record(tensor.as_ptr() as u64)) };
        let known: Vec<(Option<Reading>, &View)> =
            probes.iter().zip(views).map(|(probe, view)| (look(probe), view)).collect();
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
        let strange = strangers.iter().filter_map(look).all(|stranger| {
            known.iter().all(|(reading, _)| reading.as_ref().is_none_or(|reading| reading.words != stranger.words))
        });
        (known.iter().all(right) && told_apart && strange).then_some(recall)
    }

    /// Where records lie.
    pub fn record_at(&self) -> RecordAt {
        self.at
    }

    /// The way to gradients, if it was found.
    pub fn grads(&self) -> Option<GradAt> {
        self.grads
    }

    /// The words of a tensor; `None` if it has no storage or its shape is not within the record.
    ///
    /// # Safety
    /// `record` must be that of a live tensor.
    unsafe fn read(&self, record: u64) -> Option<Reading> {
        // SAFETY: the tensor is live, and so are its record and storage, which have these words: a record ends
        // behind its dispatch keys, `FROM_SHAPE` words from the number of dimensions.
        unsafe {
            let first = record + self.shape - 8;
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

/// A kind of tensors, with the view of one.
#[derive(Clone, Copy, Debug)]
struct KindOf {
    words: Words,
    view: View,
    /// Another kind with the same view, in a ring: records have bits that torch leaves as it found them.
    twin: u32,
}

/// Kinds by their numbers.
#[derive(Clone, Debug, Default)]
pub struct Palette(Vec<KindOf>);

impl Palette {
    /// The view of a tensor if it is of the kind of this number or of one with the same view.
    ///
    /// # Safety
    /// `record` must be that of a live tensor.
    pub unsafe fn view(&self, recall: &Recall, number: u32, record: u64) -> Option<View> {
        let mut kind = self.0.get(number as usize)?;
        // SAFETY: the caller's promise.
        let reading = unsafe { recall.read(record) }?;
        while reading.words != kind.words {
            if kind.twin == number {
                return None;
            }
            kind = self.0.get(kind.twin as usize)?;
        }
        // Without memory it was released, which the full reading tells.
        let view = reading.of(&kind.view);
        (view.numel == 0 || reading.storage != 0).then_some(view)
    }
}

/// Kinds of tensors that were read in full, each with the view of one.
#[derive(Debug, Default)]
pub struct Kinds {
    palette: Arc<Palette>,
    numbers: HashMap<Words, u32>,
    /// A kind with each view.
    twins: HashMap<View, u32>,
}

/// No kind.
pub const UNKNOWN: u32 = u32::MAX;

impl Kinds {
    /// All of them, for threads.
    pub fn palette(&self) -> Arc<Palette> {
        self.palette.clone()
    }

    /// The view of a live tensor if it is of the kind of this number.
    pub fn view(&self, recall: &Recall, number: u32, tensor: &Bound<'_, PyAny>) -> Option<View> {
        // SAFETY: the tensor is live.
        unsafe { self.palette.view(recall, number, recall.at.record(tensor.as_ptr() as u64)) }
    }

    /// Number of the kind of a live tensor that was read in full.
    pub fn learn(&mut self, recall: &Recall, tensor: &Bound<'_, PyAny>, view: &View) -> u32 {
        // The bytes of other elements are not known, so neither are addresses behind an offset.
        if view.dtype == Dtype::Other {
            return UNKNOWN;
        }
        // SAFETY: the tensor is live.
        let Some(reading) = (unsafe { recall.read(recall.at.record(tensor.as_ptr() as u64)) }) else { return UNKNOWN };
        if reading.of(view) != *view {
            return UNKNOWN;
        }
        let Kinds { palette, numbers, twins } = self;
        *numbers.entry(reading.words).or_insert_with(|| {
            // A thread that was late may still hold it.
            let Palette(kinds) = Arc::make_mut(palette);
            let number = kinds.len() as u32;
            let first = *twins.entry(View { address: 0, record: 0, ..*view }).or_insert(number);
            let twin = kinds.get_mut(first as usize).map_or(number, |kind| std::mem::replace(&mut kind.twin, number));
            kinds.push(KindOf { words: reading.words, view: *view, twin });
            number
        })
    }

    /// Forgets all kinds if there are more than `tensors` can be of, as after many changes of shape; says whether it did.
    /// Numbers then mean other kinds.
    pub fn keep_within(&mut self, tensors: usize) -> bool {
        let crowded = self.numbers.len() > tensors;
        if crowded {
            *self = Kinds::default();
        }
        crowded
    }
}
