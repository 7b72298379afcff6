//! Loads of any sizes through a buffer of any room, and buffers that overlap in any way.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use te_patches_core::loader::overlap::{Extent, shared};
use te_patches_core::loader::pieces::{Pass, Size, portions};
use te_patches_core::tensor::{Device, Dtype, View};

#[derive(Arbitrary, Debug)]
struct Load {
    sizes: Vec<(u16, u8, bool)>,
    room: u8,
    buffers: Vec<(u8, u8)>,
}

fn extent((start, length): (u8, u8)) -> Option<Extent> {
    Extent::of(&View::new(u64::from(start), &[i64::from(length % 8)], &[1], Dtype::E4M3, Device::Cpu))
}

fuzz_target!(|load: Load| {
    // The least that `portions` takes: thirty-two of the largest elements.
    let room = (u64::from(load.room) + 8) * 16;
    let sizes: Vec<Size> = load
        .sizes
        .iter()
        .map(|&(numel, bytes, two_passes)| Size { numel: u64::from(numel) + 1, bytes: 1 << (bytes % 3), two_passes })
        .collect();
    let mut elements = vec![0; sizes.len()];
    for portion in portions(&sizes, room) {
        assert!(!portion.is_empty());
        for piece in portion {
            assert!(piece.offset + piece.count * sizes[piece.copy].bytes <= room);
            if piece.pass != Pass::Absmax {
                assert_eq!(piece.start, elements[piece.copy]);
                elements[piece.copy] += piece.count;
            }
        }
    }
    assert!(elements.iter().zip(&sizes).all(|(&written, size)| written == size.numel));

    let buffers: Vec<Option<Extent>> = load.buffers.iter().take(64).map(|&buffer| extent(buffer)).collect();
    let found = shared(&buffers, &vec![None; buffers.len()], &[]);
    for (at, buffer) in load.buffers.iter().take(64).enumerate() {
        let bytes = |&(start, length): &(u8, u8)| u64::from(start)..u64::from(start) + u64::from(length % 8);
        let mine = bytes(buffer);
        let met = load.buffers.iter().take(64).enumerate().any(|(other, buffer)| {
            let theirs = bytes(buffer);
            other != at && !mine.is_empty() && !theirs.is_empty() && mine.start < theirs.end && theirs.start < mine.end
        });
        assert_eq!(found[at], met);
    }
});
