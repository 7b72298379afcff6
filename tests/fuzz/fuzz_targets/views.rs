//! Descriptions of tensors: what a view says of the order of its elements, against walking through them.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use te_patches_core::tensor::{Device, Dtype, Layout, View};

#[derive(Arbitrary, Debug)]
struct Description {
    /// Size, stride and another stride of each dimension, to be made small.
    dims: Vec<(u8, u8, u8)>,
}

/// Where each element lies, in row-major order of the indices.
fn offsets(shape: &[i64], strides: &[i64]) -> Vec<i64> {
    let mut found = vec![0];
    for (&size, &stride) in shape.iter().zip(strides) {
        found = found.iter().flat_map(|&start| (0..size).map(move |at| start + at * stride)).collect();
    }
    found
}

fuzz_target!(|description: Description| {
    let dims = &description.dims[..description.dims.len().min(5)];
    let shape: Vec<i64> = dims.iter().map(|dim| i64::from(dim.0 % 5)).collect();
    let strides = [
        dims.iter().map(|dim| i64::from(dim.1 % 64)).collect::<Vec<_>>(),
        dims.iter().map(|dim| i64::from(dim.2 % 64)).collect::<Vec<_>>(),
    ];
    let views = strides.each_ref().map(|s| View::new(16, &shape, s, Dtype::F32, Device::Cpu));
    let walks = strides.each_ref().map(|s| offsets(&shape, s));
    for (view, walk) in views.iter().zip(&walks) {
        assert_eq!(view.numel, walk.len() as u64);
        if walk.is_empty() {
            continue;
        }
        let row_major = walk.iter().copied().eq(0..walk.len() as i64);
        assert_eq!(view.layout == Layout::CONTIGUOUS, row_major);
        let mut sorted = walk.clone();
        sorted.sort_unstable();
        let dense = sorted.iter().copied().eq(0..walk.len() as i64);
        assert_eq!(view.layout != Layout::SCATTERED, dense);
        assert_eq!(view.span, 1 + *sorted.last().expect("not empty") as u64);
    }
    if !walks[0].is_empty() && views[0].layout == views[1].layout && views[0].layout != Layout::SCATTERED {
        assert_eq!(walks[0], walks[1], "one layout, two orders");
    }
});
