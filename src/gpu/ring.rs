//! UNSAFE: streams tensors between host and device through buffers of bounded size: threads fill (or empty) page-locked
//! slots while the device copies others, and kernels convert between storages on the device. Page-locked sources are
//! read by the device directly. Invariant: a slot is touched by the host only after the stream has passed its last
//! copy.

use anyhow::Result;
use rayon::prelude::*;

use crate::gpu::driver::{Event, Gpu, Stream};
use crate::gpu::kernels::Kernels;
use crate::gpu::registry::with_kernels;
use crate::loader::pieces::{Pass, Piece, Size, portions};
use crate::loader::{Copy, tables};

/// Slots of page-locked memory: one is filled while the device copies another and a third waits its turn.
pub const SLOTS: usize = 3;
/// Bytes of a slot, and of the buffer on the device.
pub const SLOT_BYTES: u64 = 16 << 20;
/// Bytes that one thread copies at a time.
const SHARE: usize = 256 << 10;

/// The buffers, and where they are used.
pub struct Ring {
    /// CUDA device.
    pub device: u16,
    /// Stream on which everything is ordered.
    pub stream: Stream,
    /// Address of `SLOTS` slots of page-locked memory.
    pub host: u64,
    /// Address of the buffer on the device.
    pub staging: u64,
}

impl Ring {
    fn events(&self) -> Result<Vec<Event>> {
        (0..SLOTS).map(|_| with_kernels(self.device, |kernels| kernels.gpu().event())).collect()
    }

    fn slot(&self, at: usize) -> u64 {
        self.host + at as u64 * SLOT_BYTES
    }

    /// The device, for waiting without a lock on its kernels: other threads may step meanwhile.
    fn gpu(&self) -> Result<Gpu> {
        with_kernels(self.device, |kernels| Ok(*kernels.gpu()))
    }

    /// Waits until the stream is done, whatever `outcome` was: the host's memory is no longer used then.
    fn settle<T>(&self, outcome: Result<T>) -> Result<T> {
        self.gpu()?.finish(self.stream).and(outcome)
    }

    /// Copies from the host to the device. `done` is told the bytes of each portion.
    ///
    /// # Safety
    /// Sources are in host memory, targets and what scales them on the device, all valid on the stream and until this
    /// returns; so are the buffers, which nothing else uses meanwhile.
    pub unsafe fn load(&self, copies: &[Copy], done: &mut dyn FnMut(u64)) -> Result<()> {
        // SAFETY: the caller's promise.
        self.settle(unsafe { self.load_portions(copies, done) })
    }

    unsafe fn load_portions(&self, copies: &[Copy], done: &mut dyn FnMut(u64)) -> Result<()> {
        let pinned: Vec<bool> = with_kernels(self.device, |kernels| {
            Ok(copies.iter().map(|copy| kernels.gpu().is_pinned(copy.source)).collect())
        })?;
        let size = |copy: &Copy| Size {
            numel: copy.numel,
            bytes: copy.cast.source.bytes(),
            two_passes: copy.cast.two_passes(),
        };
        let sizes: Vec<Size> = copies.iter().map(size).collect();
        let events = self.events()?;
        for (turn, portion) in portions(&sizes, SLOT_BYTES).iter().enumerate() {
            let slot = self.slot(turn % SLOTS);
            self.gpu()?.wait(&events[turn % SLOTS])?;
            let bytes = |piece: &Piece| (piece.count * sizes[piece.copy].bytes) as usize;
            let source = |piece: &Piece| copies[piece.copy].source + piece.start * sizes[piece.copy].bytes;
            let filled = portion.iter().filter(|piece| !pinned[piece.copy]);
            let shares = filled.map(|piece| (source(piece), slot + piece.offset, bytes(piece)));
            // SAFETY: the caller's promise for the sources; the device has left the slot.
            unsafe { copy_host(shares) };
            with_kernels(self.device, |kernels| {
                let gpu = kernels.gpu();
                // What lies side by side in the slot goes in one copy.
                let mut at = 0;
                while at < portion.len() {
                    let first = &portion[at];
                    let (from, mut end) = (first.offset, first.offset + bytes(first) as u64);
                    at += 1;
                    let host = if pinned[first.copy] {
                        source(first)
                    } else {
                        while let Some(next) = portion.get(at).filter(|piece| !pinned[piece.copy]) {
                            end = next.offset + bytes(next) as u64;
                            at += 1;
                        }
                        slot + from
                    };
                    // SAFETY: host memory stays until the stream has passed, which is waited for before slots are
                    // filled again and before this returns; the buffer on the device is used in the stream's order.
                    unsafe { gpu.copy_in(self.staging + from, host, (end - from) as usize, self.stream) }?;
                }
                gpu.mark(&events[turn % SLOTS], self.stream)?;
                // SAFETY: the caller's promise; the pieces are in the buffer by then.
                unsafe {
                    self.cast(kernels, copies, portion, |piece, copy| Copy {
                        source: self.staging + piece.offset,
                        ..copy
                    })
                }
            })?;
            done(portion.iter().filter(|piece| piece.pass != Pass::Absmax).map(|piece| bytes(piece) as u64).sum());
        }
        Ok(())
    }

    /// Copies from the device to the host. `done` is told the bytes of each portion.
    ///
    /// # Safety
    /// Sources and what scales them are on the device, targets in host memory, all valid on the stream and until this
    /// returns; so are the buffers, which nothing else uses meanwhile. No target is scaled.
    pub unsafe fn save(&self, copies: &[Copy], done: &mut dyn FnMut(u64)) -> Result<()> {
        // SAFETY: the caller's promise.
        self.settle(unsafe { self.save_portions(copies, done) })
    }

    unsafe fn save_portions(&self, copies: &[Copy], done: &mut dyn FnMut(u64)) -> Result<()> {
        let size = |copy: &Copy| Size { numel: copy.numel, bytes: copy.cast.target.bytes(), two_passes: false };
        let sizes: Vec<Size> = copies.iter().map(size).collect();
        let events = self.events()?;
        let portions = portions(&sizes, SLOT_BYTES);
        // Gaps between pieces are copied along with them.
        // SAFETY: the buffer is the caller's, unused so far.
        with_kernels(self.device, |kernels| unsafe {
            kernels.gpu().clear(self.staging, SLOT_BYTES as usize, self.stream)
        })?;
        let mut empty = |turn: usize| -> Result<()> {
            self.gpu()?.wait(&events[turn % SLOTS])?;
            let bytes = |piece: &Piece| (piece.count * sizes[piece.copy].bytes) as usize;
            let target = |piece: &Piece| copies[piece.copy].target + piece.start * sizes[piece.copy].bytes;
            let slot = self.slot(turn % SLOTS);
            let pieces = portions[turn].iter();
            // SAFETY: the caller's promise for the targets; the device has filled the slot.
            unsafe { copy_host(pieces.map(|piece| (slot + piece.offset, target(piece), bytes(piece)))) };
            done(portions[turn].iter().map(|piece| bytes(piece) as u64).sum());
            Ok(())
        };
        for (turn, portion) in portions.iter().enumerate() {
            // The slot is free once its last portion was taken out.
            if turn >= SLOTS {
                empty(turn - SLOTS)?;
            }
            with_kernels(self.device, |kernels| {
                // SAFETY: the caller's promise; the buffer on the device is used in the stream's order.
                unsafe {
                    self.cast(kernels, copies, portion, |piece, copy| Copy {
                        target: self.staging + piece.offset,
                        ..copy
                    })
                }?;
                let end = portion.last().map_or(0, |piece| piece.offset + piece.count * sizes[piece.copy].bytes);
                let gpu = kernels.gpu();
                // SAFETY: as above; the slot was emptied.
                unsafe { gpu.copy_out(self.slot(turn % SLOTS), self.staging, end as usize, self.stream) }?;
                gpu.mark(&events[turn % SLOTS], self.stream)
            })?;
        }
        (portions.len().saturating_sub(SLOTS)..portions.len()).try_for_each(empty)
    }

    /// Launches the kernels of a portion, whose pieces have one side in the buffer.
    ///
    /// # Safety
    /// As for [`Kernels::cast`].
    unsafe fn cast(
        &self,
        kernels: &mut Kernels,
        copies: &[Copy],
        portion: &[Piece],
        place: impl Fn(&Piece, Copy) -> Copy,
    ) -> Result<()> {
        let bytes = kernels.parameter_bytes();
        let placed = |piece: &Piece| place(piece, copies[piece.copy].part(piece.start, piece.count));
        let absmax = portion.iter().filter(|piece| piece.pass != Pass::Write);
        // SAFETY: the caller's promise.
        unsafe { run(kernels, absmax.map(placed), bytes, true, self.stream)? };
        let write = portion.iter().filter(|piece| piece.pass != Pass::Absmax);
        // SAFETY: the caller's promise.
        unsafe { run(kernels, write.map(placed), bytes, false, self.stream) }
    }
}

/// Launches one pass of some copies.
///
/// # Safety
/// As for [`Kernels::cast`].
pub unsafe fn run(
    kernels: &mut Kernels,
    copies: impl Iterator<Item = Copy>,
    parameter_bytes: usize,
    absmax: bool,
    stream: Stream,
) -> Result<()> {
    tables(copies, parameter_bytes).iter().try_for_each(|(cast, table)| {
        // SAFETY: the caller's promise.
        unsafe { kernels.cast(*cast, table, absmax, stream) }
    })
}

/// Copies (source, target, bytes) in host memory, by all threads.
///
/// # Safety
/// All must be valid, targets touched by nothing else, and no target may overlap a source.
unsafe fn copy_host(copies: impl Iterator<Item = (u64, u64, usize)>) {
    let shares: Vec<(u64, u64, usize)> = copies
        .flat_map(|(source, target, bytes)| {
            (0..bytes).step_by(SHARE).map(move |at| (source + at as u64, target + at as u64, SHARE.min(bytes - at)))
        })
        .collect();
    shares.into_par_iter().for_each(|(source, target, bytes)| {
        // SAFETY: the caller's promise; shares do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(source as *const u8, target as *mut u8, bytes) };
    });
}
