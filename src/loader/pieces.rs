//! Copies cut into portions of bounded size, for buffers of bounded size between host and device.
//! Integer arithmetic only.

/// What is done with a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Its largest magnitude is found.
    Absmax,
    /// It is written.
    Write,
    /// Both, one after the other.
    Both,
}

/// Elements of one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the copy.
    pub copy: usize,
    /// First element.
    pub start: u64,
    /// Elements.
    pub count: u64,
    /// Where in the buffer it lies, in bytes.
    pub offset: u64,
    /// What is done with it.
    pub pass: Pass,
}

/// What of a copy matters here.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Elements.
    pub numel: u64,
    /// Bytes that each takes in the buffer.
    pub bytes: u64,
    /// Whether the largest magnitude has to be known before anything is written.
    pub two_passes: bool,
}

/// Addresses of pieces in a buffer are multiples of this, as vector accesses want them.
const ALIGNMENT: u64 = 16;

/// Cuts copies into portions that fit into a buffer of `room` bytes each, in order. The room holds at least
/// thirty-two elements of each copy, so that half of it holds an aligned piece.
pub fn portions(sizes: &[Size], room: u64) -> Vec<Vec<Piece>> {
    debug_assert!(sizes.iter().all(|size| 2 * size.bytes * ALIGNMENT <= room), "no aligned piece fits into half of it");
    let mut portions = vec![Vec::new()];
    let mut used = 0;
    for (copy, size) in sizes.iter().enumerate() {
        let whole = size.numel * size.bytes <= room;
        let passes = match (size.two_passes, whole) {
            (false, _) => &[Pass::Write][..],
            (true, true) => &[Pass::Both],
            (true, false) => &[Pass::Absmax, Pass::Write],
        };
        for &pass in passes {
            let mut start = 0;
            while start < size.numel {
                let fits = (room - used) / size.bytes;
                // What needs both passes at once is not cut; other pieces are not cut into crumbs.
                if fits < size.numel - start && (pass == Pass::Both || fits * size.bytes < room / 2) && used > 0 {
                    portions.push(Vec::new());
                    used = 0;
                    continue;
                }
                let count = if fits >= size.numel - start { size.numel - start } else { fits - fits % ALIGNMENT };
                if let Some(portion) = portions.last_mut() {
                    portion.push(Piece { copy, start, count, offset: used, pass });
                }
                start += count;
                used = (used + count * size.bytes).next_multiple_of(ALIGNMENT).min(room);
            }
        }
    }
    portions.retain(|portion| !portion.is_empty());
    portions
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_element_is_done_once_in_order_within_bounds(
            sizes in prop::collection::vec((1u64..5000, prop::sample::select(vec![1u64, 2, 4]), prop::bool::ANY),
            0..40), room in 32u64..200,
        ) {
            let room = room * 16;
            let sizes: Vec<Size> =
                sizes.into_iter().map(|(numel, bytes, two_passes)| Size { numel, bytes, two_passes }).collect();
            let mut found = vec![0; sizes.len()];
            let mut written = vec![0; sizes.len()];
            for portion in portions(&sizes, room) {
                let mut end = 0;
                for piece in portion {
                    let size = sizes[piece.copy];
                    prop_assert!(piece.offset >= end && piece.offset % 16 == 0 && piece.count > 0);
                    end = piece.offset + piece.count * size.bytes;
                    prop_assert!(end <= room);
                    if piece.pass != Pass::Write {
                        prop_assert_eq!(piece.start, found[piece.copy]);
                        found[piece.copy] += piece.count;
                    }
                    if piece.pass != Pass::Absmax {
                        prop_assert_eq!(piece.start, written[piece.copy]);
                        written[piece.copy] += piece.count;
                        if size.two_passes {
                            prop_assert_eq!(found[piece.copy], size.numel, "written before its largest is known");
                        }
                    }
                }
            }
            for (at, size) in sizes.iter().enumerate() {
                prop_assert_eq!(written[at], size.numel);
                prop_assert_eq!(found[at], if size.two_passes { size.numel } else { 0 });
            }
        }
    }
}
