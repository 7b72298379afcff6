//! The native core of `te_patches`.
//!
//! Layers, lower ones know nothing of higher ones:
//! `tensor`, `options` (plain data) → `plan` (which launches a step makes), `loader` (which copies a load makes) →
//! `cpu`, `gpu` (running them) → `python` (reading Python objects, the classes that Python sees).
//! `unsafe` lives in `cpu::{kernels, scaling, casts}` (elements at tensors' addresses), `gpu::{nvrtc, driver, ring}`
//! (foreign calls, copies) and `python::{reader, quantized, shim, recall, sweep, prefetch}` (Python objects); `gpu::kernels` and
//! `python::{again, device, lists, moves, step}` hand addresses on. `threads` are those of `cpu` and of `python::sweep`.

pub mod cpu;
pub mod gpu;
pub mod loader;
pub mod options;
pub mod plan;
mod python;
pub mod tensor;
mod threads;
