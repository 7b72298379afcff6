//! UNSAFE: knows many tensors by their words, with several threads. One core waits for memory most of the time that it
//! reads tensors; a few more wait at the same time.
//! Rows are handed to them while more are made; what no thread has begun in the end the caller does itself, so that nobody
//! waits for a thread to wake.
//! Invariant: a thread reads objects only between the taking and the marking of a chunk, and the caller, who holds the
//! interpreter's lock and so keeps them alive, waits for every chunk.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::plan::column::Role;
use crate::plan::operands::ROLES;
use crate::python::prefetch::{self, STORAGE_WORDS, read};
use crate::python::recall::{GradAt, Palette, Recall};
use crate::threads::READERS;

/// Where a row of scaled tensors has the factors of its states, and what else scales its parameter and two moments: three
/// each.
pub const FACTORS: usize = ROLES;
pub const INSIDES: usize = FACTORS + 3;
/// Objects that a row has room for: rows travel between cores, so those without scaled tensors are short.
pub const UNSCALED: usize = ROLES;
pub const SCALED: usize = INSIDES + 3 * 3;
/// Rows that a thread takes at once: what it asks for in advance fits its nearest cache.
const CHUNK: usize = 8;
/// Chunks from which on calling threads costs less than it saves.
const WORTH_CALLING: usize = 8;
/// How often a thread looks for another chunk in vain: some microseconds, since the one that steps may wait for this core.
const PATIENCE: u32 = 64;

/// What became of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Found {
    /// Something is not as it was.
    #[default]
    Unknown,
    /// The parameter has no gradient.
    Idle,
    /// All tensors are of the kinds that they should be of.
    Known,
}

/// The tensors of one parameter.
#[derive(Clone, Copy, Debug)]
pub struct Row<const PLACES: usize> {
    /// Which parameter.
    pub index: u32,
    /// Its Python object.
    pub param: u64,
    /// Its gradient's, if gradients are given.
    pub grad: u64,
    /// The other objects: parameter, states and what scales them, each in its place behind the gradient's; all 0 if only the
    /// absence of a gradient is asked for. Once known, the addresses of the first elements of all.
    pub words: [u64; PLACES],
    /// The kinds that they should be of.
    pub kinds: [u32; PLACES],
    /// Which of them are DTensors, a bit for each place.
    pub sharded: u32,
    /// Whether the gradient is one.
    pub grad_sharded: bool,
    /// What became of it.
    pub found: Found,
}

impl<const PLACES: usize> Row<PLACES> {
    /// A row of no parameter.
    pub const EMPTY: Row<PLACES> = Row {
        index: 0,
        param: 0,
        grad: 0,
        words: [0; PLACES],
        kinds: [0; PLACES],
        sharded: 0,
        grad_sharded: false,
        found: Found::Unknown,
    };

    fn give_up(&mut self) {
        *self = Row { index: self.index, ..Row::EMPTY };
    }
}

/// A class of tensors.
#[derive(Clone, Copy, Debug)]
pub struct KnownClass {
    /// Address of the class.
    pub class: u64,
    /// Whether its objects' elements are known to be their own, or those of their local tensors.
    pub whole: bool,
    /// Where its objects point at their local tensor; `None` if their elements are their own.
    pub slot: Option<u64>,
    /// Whether its gradients are those that torch keeps.
    pub graded: bool,
}

/// What it takes to know a tensor.
pub struct Sight {
    pub recall: Recall,
    pub classes: Vec<KnownClass>,
    pub palette: Arc<Palette>,
    /// The way to gradients; `None` if they are given.
    pub grads: Option<GradAt>,
}

impl Sight {
    fn class(&self, object: u64) -> Option<&KnownClass> {
        self.classes.iter().find(|known| known.class == prefetch::class(object))
    }

    fn whole(&self, object: u64) -> Option<&KnownClass> {
        self.class(object).filter(|known| known.whole)
    }

    /// The tensor that holds the elements; `None` if the object is of another class than expected.
    ///
    /// # Safety
    /// `object` must be 0 or a live Python object.
    unsafe fn local(&self, object: u64, sharded: bool) -> Option<u64> {
        if object == 0 {
            return None;
        }
        match (self.whole(object)?.slot, sharded) {
            (None, false) => Some(object),
            (Some(slot), true) => {
                // SAFETY: objects of this class have this word, which is 0 or a live object.
                let local = unsafe { read(object + slot) };
                (local != 0 && self.whole(local)?.slot.is_none()).then_some(local)
            }
            _ => None,
        }
    }

    /// Finds what became of rows, pass by pass, so that the memory of one pass arrives during the one before.
    ///
    /// # Safety
    /// All objects must be live.
    unsafe fn look<const PLACES: usize>(&self, rows: &mut [Row<PLACES>]) {
        let at = self.recall.record_at();
        for row in rows.iter() {
            row.words.iter().chain([&row.param, &row.grad]).filter(|&&object| object != 0).for_each(|&object| {
                prefetch::object(object);
            });
        }
        // SAFETY, here and below: objects are live by the caller's promise, and so are their records and what those
        // point at.
        // Local tensors; the record of the parameter, on the way to its gradient.
        each(rows, |row| {
            row.found = Found::Known;
            for (place, word) in row.words.iter_mut().enumerate().filter(|(_, word)| **word != 0) {
                // SAFETY: see above.
                *word = unsafe { self.local(*word, row.sharded >> place & 1 == 1) }?;
                prefetch::object(*word);
            }
            if self.grads.is_some() {
                self.class(row.param)?.graded.then_some(())?;
                row.grad = at.record(row.param);
                prefetch::lines(row.grad, 1);
            } else {
                (row.words[Role::Param as usize] != 0).then_some(())?;
                // SAFETY: see above.
                row.words[0] = unsafe { self.local(row.grad, row.grad_sharded) }?;
                prefetch::object(row.words[0]);
            }
            Some(())
        });
        // Records; autograd's.
        each(rows, |row| {
            for word in row.words.iter_mut().filter(|word| **word != 0) {
                *word = at.record(*word);
                prefetch::record(*word);
            }
            if self.grads.is_some() {
                // SAFETY: see above.
                row.grad = unsafe { GradAt::autograd(row.grad) };
                prefetch::lines(row.grad, 2);
            }
            Some(())
        });
        // Storages; the gradients' records.
        each(rows, |row| {
            // SAFETY: see above.
            row.words.iter().filter(|word| **word != 0).for_each(|&word| unsafe { self.fetch_storage(word) });
            if let Some(grads) = self.grads {
                // SAFETY: see above.
                row.grad = unsafe { grads.record(row.grad) };
                if row.grad == 0 {
                    *row = Row { index: row.index, found: Found::Idle, ..Row::EMPTY };
                } else {
                    (row.words[Role::Param as usize] != 0).then_some(())?;
                    row.words[0] = row.grad;
                    prefetch::record(row.grad);
                }
            }
            Some(())
        });
        if let Some(grads) = self.grads {
            // The gradients' objects, where they are DTensors; else their storages.
            each(rows, |row| {
                // SAFETY: see above.
                unsafe {
                    if row.grad_sharded {
                        row.grad = grads.object(row.grad);
                        prefetch::object(row.grad);
                    } else {
                        self.fetch_storage(row.grad);
                    }
                }
                Some(())
            });
            sharded(rows, |row| {
                // SAFETY: see above.
                row.grad = unsafe { self.local(row.grad, true) }?;
                prefetch::object(row.grad);
                Some(())
            });
            sharded(rows, |row| {
                row.words[0] = at.record(row.grad);
                prefetch::record(row.words[0]);
                Some(())
            });
            sharded(rows, |row| {
                // SAFETY: see above.
                unsafe { self.fetch_storage(row.words[0]) };
                Some(())
            });
        }
        each(rows, |row| {
            for (word, &kind) in row.words.iter_mut().zip(&row.kinds).filter(|(word, _)| **word != 0) {
                // SAFETY: see above.
                *word = unsafe { self.palette.view(&self.recall, kind, *word) }?.address;
            }
            Some(())
        });
    }

    /// Asks for the storage of a tensor.
    ///
    /// # Safety
    /// `record` must be that of a live tensor.
    unsafe fn fetch_storage(&self, record: u64) {
        // SAFETY: the caller's promise.
        prefetch::lines(unsafe { prefetch::storage(record) } + STORAGE_WORDS, 1);
    }
}

/// Gives up every row that does not pass; those that were given up or are idle are left out.
fn each<const PLACES: usize>(rows: &mut [Row<PLACES>], pass: impl Fn(&mut Row<PLACES>) -> Option<()>) {
    for row in rows.iter_mut().filter(|row| row.param != 0) {
        if pass(row).is_none() {
            row.give_up();
        }
    }
}

/// As `each`, of rows whose gradients are DTensors.
fn sharded<const PLACES: usize>(rows: &mut [Row<PLACES>], pass: impl Fn(&mut Row<PLACES>) -> Option<()>) {
    each(rows, |row| if row.grad_sharded { pass(row) } else { Some(()) });
}

/// Rows to be found, by whoever has time.
struct Task<const PLACES: usize> {
    sight: Sight,
    chunks: Vec<Mutex<[Row<PLACES>; CHUNK]>>,
    /// Chunks that are filled, the next one that nobody has taken, and those that are done.
    ready: AtomicUsize,
    next: AtomicUsize,
    done: AtomicUsize,
}

impl<const PLACES: usize> Task<PLACES> {
    /// Finds a chunk that is filled and that nobody has taken; says whether there was one.
    ///
    /// # Safety
    /// The objects of filled chunks must be live until those chunks are done.
    unsafe fn help(&self) -> bool {
        let take = |next| (next < self.ready.load(Ordering::Acquire)).then_some(next + 1);
        let Ok(taken) = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) else { return false };
        // SAFETY: this chunk is not done.
        unsafe { self.sight.look(&mut *self.chunks[taken].lock().unwrap_or_else(PoisonError::into_inner)) };
        self.done.fetch_add(1, Ordering::Release);
        true
    }
}

/// Keeps the memory of a group's rows from one step to the next: large blocks are not for the allocator, which tidies up
/// after a whole forward and backward pass when it is asked for one.
#[derive(Default)]
pub struct Memory<const PLACES: usize>(Vec<Mutex<[Row<PLACES>; CHUNK]>>);

/// Rows that are handed to whoever has time while more of them are made.
pub struct Sweep<const PLACES: usize> {
    task: Arc<Task<PLACES>>,
    filling: [Row<PLACES>; CHUNK],
    filled: usize,
}

impl<const PLACES: usize> Sweep<PLACES> {
    /// Begins to find the tensors of up to `rows` parameters.
    pub fn new(sight: Sight, rows: usize, memory: &mut Memory<PLACES>) -> Sweep<PLACES> {
        let mut chunks = std::mem::take(&mut memory.0);
        chunks.resize_with(rows.div_ceil(CHUNK), || Mutex::new([Row::EMPTY; CHUNK]));
        let [ready, next, done] = [const { AtomicUsize::new(0) }; 3];
        Sweep { task: Arc::new(Task { sight, chunks, ready, next, done }), filling: [Row::EMPTY; CHUNK], filled: 0 }
    }

    /// Adds a row.
    ///
    /// # Safety
    /// Its objects must be live and stay so until this is finished or dropped: the interpreter's lock is held, and no code
    /// of Python's runs.
    pub unsafe fn push(&mut self, row: Row<PLACES>) {
        self.filling[self.filled] = row;
        self.filled += 1;
        if self.filled == CHUNK {
            self.publish();
        }
    }

    fn publish(&mut self) {
        let at = self.task.ready.load(Ordering::Relaxed);
        *self.task.chunks[at].lock().unwrap_or_else(PoisonError::into_inner) = self.filling;
        self.task.ready.store(at + 1, Ordering::Release);
        (self.filling, self.filled) = ([Row::EMPTY; CHUNK], 0);
        if at + 1 == WORTH_CALLING {
            let task = self.task.clone();
            READERS.call(move || {
                let mut waited = 0;
                while waited < PATIENCE {
                    // SAFETY: the sweep keeps the objects alive until every chunk is done.
                    waited = if unsafe { task.help() } { 0 } else { waited + 1 };
                    std::hint::spin_loop();
                }
            });
        }
    }

    /// Hands on the rows of which something became, and gives the memory back.
    pub fn finish(mut self, memory: &mut Memory<PLACES>, mut each: impl FnMut(&Row<PLACES>)) {
        if self.filled > 0 {
            self.publish();
        }
        self.wait();
        let task = self.task.clone();
        drop(self);
        for chunk in &task.chunks[..task.ready.load(Ordering::Relaxed)] {
            let rows = chunk.lock().unwrap_or_else(PoisonError::into_inner);
            rows.iter().filter(|row| row.found != Found::Unknown).for_each(&mut each);
        }
        // A thread that was late may still hold it.
        memory.0 = Arc::into_inner(task).map_or_else(Vec::new, |task| task.chunks);
    }

    /// Helps until all that is filled is done.
    fn wait(&self) {
        // SAFETY: the objects are live, by the promise made for each row.
        while unsafe { self.task.help() } {}
        let mut waited = 0u32;
        while self.task.done.load(Ordering::Acquire) < self.task.ready.load(Ordering::Relaxed) {
            waited += 1;
            if waited.is_multiple_of(128) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl<const PLACES: usize> Drop for Sweep<PLACES> {
    fn drop(&mut self) {
        self.wait();
    }
}
