//! Loading and saving states: which copies between storages are made, of what, and in which portions.
//! Numbers only; knows nothing of Python, CUDA or Adam's arithmetic. Invariant: a copy writes its target and the
//! numbers that scale it, nothing else.

pub mod overlap;
pub mod pieces;

use crate::plan::operands::{Scaled, Scaling};
use crate::plan::table::{Table, capacity};
use crate::tensor::Dtype;

/// What a copy does to every element: one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cast {
    /// Storage type of the source.
    pub source: Dtype,
    /// Storage type of the target.
    pub target: Dtype,
    /// Whether the source is scaled: its values are what is stored times a factor.
    pub read: bool,
    /// How the target is scaled.
    pub write: Scaled,
}

impl Cast {
    /// Addresses a tensor has in the kernel's table.
    pub fn operands(&self) -> usize {
        let write = match self.write {
            Scaled::No | Scaled::Param => 0,
            Scaled::Factor => 2,
            Scaled::State => 5,
        };
        2 + usize::from(self.read) + write
    }

    /// Whether a pass that finds the largest magnitude comes before the one that writes.
    pub fn two_passes(&self) -> bool {
        self.write != Scaled::No
    }

    /// Every cast there is: states loaded from what a checkpoint holds, and states read for one.
    pub fn all() -> Vec<Cast> {
        use Dtype::{BF16, E4M3, F16, F32, I16};
        let cast = |source, target, read, write| Cast { source, target, read, write };
        let mut all = vec![cast(I16, I16, false, Scaled::No)];
        for source in [F32, F16, BF16] {
            for (target, write) in [(F32, Scaled::No), (BF16, Scaled::No), (F16, Scaled::Factor), (E4M3, Scaled::State)]
            {
                all.push(cast(source, target, false, write));
            }
        }
        all.extend([cast(F16, F32, true, Scaled::No), cast(E4M3, F32, true, Scaled::No)]);
        all
    }
}

/// One tensor's copy.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// Its kernel.
    pub cast: Cast,
    /// Elements.
    pub numel: u64,
    /// Address of the source.
    pub source: u64,
    /// Address of the target.
    pub target: u64,
    /// Address of the factor of a scaled source.
    pub read: u64,
    /// Addresses of the numbers that scale the target.
    pub scaling: Scaling,
    /// Address of the bits of the largest magnitude, zero at first; for two passes.
    pub absmax: u64,
}

/// Operands a cast can have.
pub const MAX_OPERANDS: usize = 8;

impl Copy {
    /// The operands in the order of the kernel.
    pub fn pack(&self) -> [u64; MAX_OPERANDS] {
        let Scaling { factor, scale, scale_inv, amax } = self.scaling;
        let mut words = vec![self.source, self.target];
        words.extend(self.cast.read.then_some(self.read));
        match self.cast.write {
            Scaled::No | Scaled::Param => {}
            Scaled::Factor => words.extend([self.absmax, factor]),
            Scaled::State => words.extend([self.absmax, factor, scale, scale_inv, amax]),
        }
        std::array::from_fn(|at| words.get(at).copied().unwrap_or(0))
    }

    /// Elements `start..start + count` of this copy.
    pub fn part(&self, start: u64, count: u64) -> Copy {
        let source = self.source + start * self.cast.source.bytes();
        Copy { numel: count, source, target: self.target + start * self.cast.target.bytes(), ..*self }
    }
}

/// The launches of some copies, which may run in any order.
pub fn tables(copies: impl IntoIterator<Item = Copy>, parameter_bytes: usize) -> Vec<(Cast, Table)> {
    let mut tables: Vec<(Cast, Table)> = Vec::new();
    for copy in copies {
        let limit = capacity(parameter_bytes, copy.cast.operands());
        let open = tables.iter().rposition(|(cast, _)| *cast == copy.cast);
        let pushed = open.filter(|&at| tables[at].1.len() < limit && tables[at].1.push(copy.numel));
        let at = pushed.unwrap_or_else(|| {
            let mut table = Table::new(copy.cast.operands());
            assert!(table.push(copy.numel), "a single tensor has too many elements for a grid");
            tables.push((copy.cast, table));
            tables.len() - 1
        });
        let table = &mut tables[at].1;
        table.set_addresses(table.len() - 1, &copy.pack());
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_cast_packs_as_many_operands_as_it_has() {
        let scaling = Scaling { factor: 5, scale: 6, scale_inv: 7, amax: 8 };
        for cast in Cast::all() {
            let copy = Copy { cast, numel: 1, source: 1, target: 2, read: 3, scaling, absmax: 4 };
            let packed = copy.pack();
            assert!(packed[..cast.operands()].iter().all(|&word| word != 0), "{cast:?}");
            assert!(packed[cast.operands()..].iter().all(|&word| word == 0), "{cast:?}");
        }
    }

    proptest! {
        #[test]
        fn every_copy_is_in_exactly_one_table(
            copies in prop::collection::vec((0..Cast::all().len(), 1u64..50_000), 0..400), large: bool,
        ) {
            let bytes = if large { 32_764 } else { 4096 };
            let copies: Vec<Copy> = copies.iter().enumerate().map(|(at, &(cast, numel))| {
                let (cast, source) = (Cast::all()[cast], at as u64 + 1);
                Copy { cast, numel, source, target: 2, read: 3, scaling: Scaling::default(), absmax: 4 }
            }).collect();
            let mut found = Vec::new();
            for (cast, table) in tables(copies.iter().copied(), bytes) {
                prop_assert!(table.len() <= capacity(bytes, cast.operands()));
                found.extend((0..table.len()).map(|at| (table.addresses(at)[0], cast, table.numel(at))));
            }
            found.sort_by_key(|row| row.0);
            let expected: Vec<_> = copies.iter().map(|copy| (copy.source, copy.cast, copy.numel)).collect();
            prop_assert_eq!(found, expected);
        }
    }
}
