//! Which buffers may be written in place: those that share memory with nothing else that counts.
//! Integer arithmetic only.

use crate::tensor::{Device, View};

/// Memory of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    device: u32,
    start: u64,
    end: u64,
}

impl Extent {
    /// The memory of a tensor; `None` if it has none. A tensor with gaps counts as if it filled them, up to where its
    /// last element can lie.
    pub fn of(view: &View) -> Option<Extent> {
        let device = match view.device {
            Device::Cpu => 0,
            Device::Cuda(index) => u32::from(index) + 1,
            Device::Other => u32::MAX,
        };
        let bytes = view.span * view.dtype.bytes();
        (view.numel > 0).then_some(Extent { device, start: view.address, end: view.address + bytes })
    }

    fn meets(&self, other: &Extent) -> bool {
        self.device == other.device && self.start < other.end && other.start < self.end
    }
}

/// For each of `buffers` whether it shares memory with another of them, with one of `fixed`, or with a source other
/// than its own; a source that is exactly its own buffer is none. `sources[i]` goes with `buffers[i]`.
pub fn shared(buffers: &[Option<Extent>], sources: &[Option<Extent>], fixed: &[Extent]) -> Vec<bool> {
    let mut shared = vec![false; buffers.len()];
    let mut sorted: Vec<(Extent, usize)> =
        buffers.iter().enumerate().filter_map(|(at, extent)| extent.map(|extent| (extent, at))).collect();
    sorted.sort_unstable();
    // Where buffers overlap each other, a neighbour in this order is among those met.
    let mut furthest: Option<(Extent, usize)> = None;
    for &(extent, at) in &sorted {
        if let Some((before, other)) = furthest
            && extent.meets(&before)
        {
            (shared[at], shared[other]) = (true, true);
        }
        if furthest.is_none_or(|(before, _)| before.device != extent.device || before.end < extent.end) {
            furthest = Some((extent, at));
        }
    }
    let longest = sorted.iter().map(|(extent, _)| extent.end - extent.start).max().unwrap_or(0);
    let mut mark = |other: &Extent, own: Option<usize>| {
        let begin = Extent { start: other.start.saturating_sub(longest), end: 0, ..*other };
        let from = sorted.partition_point(|(extent, _)| *extent < begin);
        for &(extent, at) in
            sorted[from..].iter().take_while(|(extent, _)| extent.device == other.device && extent.start < other.end)
        {
            if extent.meets(other) && !(own == Some(at) && extent == *other) {
                shared[at] = true;
            }
        }
    };
    fixed.iter().for_each(|extent| mark(extent, None));
    for (at, source) in sources.iter().enumerate() {
        if let Some(source) = source {
            mark(source, Some(at));
        }
    }
    shared
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent((device, start, length): (u32, u64, u64)) -> Extent {
        Extent { device, start, end: start + length }
    }

    fn slow(buffers: &[Option<Extent>], sources: &[Option<Extent>], fixed: &[Extent]) -> Vec<bool> {
        let own = |at: usize, source: usize, extent: &Extent| at == source && buffers[at] == Some(*extent);
        (0..buffers.len())
            .map(|at| {
                buffers[at].is_some_and(|buffer| {
                    let meets = |other: &Option<Extent>| other.is_some_and(|other| buffer.meets(&other));
                    (0..buffers.len()).any(|other| other != at && meets(&buffers[other]))
                        || fixed.iter().any(|other| buffer.meets(other))
                        || (0..sources.len()).any(|source| {
                            sources[source].is_some_and(|extent| buffer.meets(&extent) && !own(at, source, &extent))
                        })
                })
            })
            .collect()
    }

    proptest! {
        #[test]
        fn agrees_with_comparing_all_pairs(
            rows in prop::collection::vec(
                (prop::option::of((0u32..2, 0u64..60, 1u64..9)), prop::option::of((0u32..2, 0u64..60, 1u64..9)),
                 prop::bool::ANY), 0..14),
            fixed in prop::collection::vec((0u32..2, 0u64..60, 1u64..9), 0..3),
        ) {
            let buffers: Vec<_> = rows.iter().map(|row| row.0.map(extent)).collect();
            // Half of the sources are their own buffers.
            let sources: Vec<_> = rows.iter().map(|row| if row.2 { row.0.map(extent) } else { row.1.map(extent)
            }).collect(); let fixed: Vec<_> = fixed.into_iter().map(extent).collect();
            prop_assert_eq!(shared(&buffers, &sources, &fixed), slow(&buffers, &sources, &fixed));
        }
    }
}
