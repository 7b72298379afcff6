//! The table of tensors that one launch works on, kept compact and written out as the kernel's parameter `Launch` of
//! `kernels/launch.cuh`. Integer arithmetic only. Invariant: `chunk_end` grows by at least one per tensor and stays below
//! 2^30, so every block finds its tensor and no tensor is empty.

use crate::options::Header;

/// Elements of a tensor that one block works on.
pub const CHUNK: u64 = 4096;
/// Chunks of one launch: half the limit of a CUDA grid's first dimension, since scaled states take two blocks each.
const MAX_CHUNKS: u64 = (1 << 30) - 1;

/// How many tensors fit into `bytes` of kernel parameters with `operands` addresses each.
pub const fn capacity(bytes: usize, operands: usize) -> usize {
    // Even, so that the two arrays of u32 fill whole words.
    ((bytes - Header::WORDS * 8) / (operands * 8 + 8)) & !1
}

/// Tensors of one launch, each with the same number of addresses.
#[derive(Debug)]
pub struct Table {
    operands: usize,
    addresses: Vec<u64>,
    chunk_end: Vec<u32>,
    tail: Vec<u32>,
}

impl Table {
    /// An empty table for a kernel with this many operands.
    pub fn new(operands: usize) -> Table {
        Table { operands, addresses: Vec::new(), chunk_end: Vec::new(), tail: Vec::new() }
    }

    /// Adds a tensor of `numel` > 0 elements; false if the launch would have too many blocks.
    pub fn push(&mut self, numel: u64) -> bool {
        let chunks = numel.div_ceil(CHUNK);
        let end = u64::from(self.chunks()) + chunks;
        if end > MAX_CHUNKS {
            return false;
        }
        assert!(chunks > 0, "empty tensors make no work and have no place in a table");
        self.addresses.resize(self.addresses.len() + self.operands, 0);
        self.chunk_end.push(end as u32);
        self.tail.push((numel - (chunks - 1) * CHUNK) as u32);
        true
    }

    /// Sets the addresses of a tensor, as many as the table's operands; 0 for the first, the gradient, means that the
    /// tensor makes no work.
    pub fn set_addresses(&mut self, tensor: usize, addresses: &[u64]) {
        let operands = self.operands;
        self.addresses[tensor * operands..(tensor + 1) * operands].copy_from_slice(&addresses[..operands]);
    }

    /// Addresses of a tensor.
    pub fn addresses(&self, tensor: usize) -> &[u64] {
        &self.addresses[tensor * self.operands..(tensor + 1) * self.operands]
    }

    /// Elements of a tensor.
    pub fn numel(&self, tensor: usize) -> u64 {
        let before = if tensor == 0 { 0 } else { self.chunk_end[tensor - 1] };
        u64::from(self.chunk_end[tensor] - before - 1) * CHUNK + u64::from(self.tail[tensor])
    }

    /// Tensors in the table.
    pub fn len(&self) -> usize {
        self.chunk_end.len()
    }

    /// Whether no tensor is in the table.
    pub fn is_empty(&self) -> bool {
        self.chunk_end.is_empty()
    }

    /// Chunks of all tensors.
    pub fn chunks(&self) -> u32 {
        self.chunk_end.last().copied().unwrap_or(0)
    }

    /// Whether any tensor has a gradient.
    pub fn has_work(&self) -> bool {
        self.addresses.iter().step_by(self.operands).any(|&grad| grad != 0)
    }

    /// The kernel's parameter: the table for a kernel compiled for `capacity` tensors.
    pub fn write_parameter(&self, header: &Header, capacity: usize, words: &mut Vec<u64>) {
        let operands = self.operands;
        assert!(self.len() <= capacity, "the launch holds fewer tensors than the table");
        words.clear();
        words.resize(Header::WORDS + capacity * (operands + 1), 0);
        words[..Header::WORDS].copy_from_slice(&header.words(self.len()));
        let (arrays, halves) = words[Header::WORDS..].split_at_mut(operands * capacity);
        for (operand, array) in arrays.chunks_exact_mut(capacity).enumerate() {
            for (word, &address) in array.iter_mut().zip(self.addresses.iter().skip(operand).step_by(operands)) {
                *word = address;
            }
        }
        // The arrays of u32 lie two to a word, low half first.
        let (ends, tails) = halves.split_at_mut(capacity / 2);
        for (array, values) in [(ends, &self.chunk_end), (tails, &self.tail)] {
            for (word, pair) in array.iter_mut().zip(values.chunks(2)) {
                *word = u64::from(pair[0]) | u64::from(pair.get(1).copied().unwrap_or(0)) << 32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::operands::MAX_OPERANDS;
    use proptest::prelude::*;

    const OPERANDS: usize = 7;

    fn parameter(table: &Table, capacity: usize) -> Vec<u64> {
        let mut words = vec![u64::MAX; 3];
        table.write_parameter(&Header::default(), capacity, &mut words);
        words
    }

    #[test]
    fn parameters_stay_within_their_limit_and_use_it() {
        for bytes in [4096, 32764] {
            for operands in 4..=MAX_OPERANDS {
                let words = parameter(&Table::new(operands), capacity(bytes, operands));
                assert!(words.len() * 8 <= bytes);
                assert!((words.len() + 2 * (operands + 1)) * 8 > bytes, "room for another pair was wasted");
            }
        }
    }

    #[test]
    fn more_than_two_to_the_31_elements_fit() {
        let mut table = Table::new(OPERANDS);
        let numel = (1 << 31) + 8;
        assert!(table.push(numel) && table.push(3));
        assert_eq!((table.numel(0), table.numel(1)), (numel, 3));
    }

    #[test]
    fn a_grid_that_is_too_large_is_refused() {
        let mut table = Table::new(OPERANDS);
        assert!(table.push(MAX_CHUNKS * CHUNK));
        assert!(!table.push(1));
    }

    proptest! {
        #[test]
        fn every_element_belongs_to_exactly_one_chunk(sizes in prop::collection::vec(1u64..40_000, 1..70)) {
            let mut table = Table::new(OPERANDS);
            let mut chunks = 0u64;
            for (tensor, &numel) in sizes.iter().enumerate() {
                prop_assert!(table.push(numel));
                chunks += numel.div_ceil(CHUNK);
                prop_assert_eq!(table.numel(tensor), numel);
                prop_assert_eq!(u64::from(table.chunk_end[tensor]), chunks);
                prop_assert!((1..=CHUNK).contains(&u64::from(table.tail[tensor])));
            }
            prop_assert_eq!(u64::from(table.chunks()), chunks);
        }

        #[test]
        fn the_parameter_holds_every_number_where_the_kernel_reads_it(
            rows in prop::collection::vec((1u64..100_000, any::<[u64; OPERANDS]>()), 1..60),
            operands in 4usize..=OPERANDS,
        ) {
            let mut table = Table::new(operands);
            for (tensor, (numel, addresses)) in rows.iter().enumerate() {
                prop_assert!(table.push(*numel));
                table.set_addresses(tensor, addresses);
            }
            let capacity = 64;
            let bytes: Vec<u8> = parameter(&table, capacity).iter().flat_map(|w| w.to_le_bytes()).collect();
            let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
            let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
            prop_assert_eq!(u32_at(72) as usize, rows.len());
            for (tensor, (numel, addresses)) in rows.iter().enumerate() {
                for (operand, &address) in addresses.iter().enumerate().take(operands) {
                    prop_assert_eq!(u64_at(80 + 8 * (operand * capacity + tensor)), address);
                }
                let ends = 80 + 8 * operands * capacity;
                let before = if tensor == 0 { 0 } else { u32_at(ends + 4 * (tensor - 1)) };
                let chunks = u64::from(u32_at(ends + 4 * tensor) - before);
                let tail = u64::from(u32_at(ends + 4 * capacity + 4 * tensor));
                prop_assert_eq!((chunks - 1) * CHUNK + tail, *numel);
            }
        }
    }
}
