//! What one parameter group's step launches. Built from checked works, owns numbers only.
//! Knows nothing of Python, CUDA or arithmetic. Invariant: after `update` every table holds this step's addresses and
//! null gradients wherever a parameter has no work.

pub mod column;
pub mod operands;
pub mod table;

use crate::plan::column::{Signature, Variant, Work};
use crate::plan::operands::{Addresses, MAX_OPERANDS};
use crate::plan::table::{Table, capacity};
use crate::tensor::Device;

/// Tensors of one device and kernel.
#[derive(Debug)]
pub struct Bucket {
    /// Device.
    pub device: Device,
    /// Kernel.
    pub variant: Variant,
    /// One launch each.
    pub tables: Vec<Table>,
}

impl Bucket {
    /// Adds a tensor; returns its table and its place there.
    fn push(&mut self, numel: u64, parameter_bytes: usize) -> (u32, u32) {
        let limit = capacity(parameter_bytes, self.variant.operands());
        let full = |table: &mut Table| table.len() == limit || !table.push(numel);
        if self.tables.last_mut().is_none_or(full) {
            let mut table = Table::new(self.variant.operands());
            assert!(table.push(numel), "a single tensor has too many elements for a grid");
            self.tables.push(table);
        }
        let table = self.tables.len() - 1;
        (table as u32, self.tables[table].len() as u32 - 1)
    }
}

/// Where a parameter's work stands; its kind is that of the bucket and its size that in the table.
#[derive(Clone, Copy, Debug)]
struct Slot {
    bucket: u32,
    table: u32,
    index: u32,
}

/// The plan of one parameter group.
#[derive(Debug, Default)]
pub struct GroupPlan {
    slots: Vec<Option<Slot>>,
    buckets: Vec<Bucket>,
    built: u64,
}

impl GroupPlan {
    /// Takes this step's works, one per parameter (`None`: no gradient or no elements), and plans anew if they are not
    /// of the kind planned for. `parameter_bytes` is the size of kernel parameters a launch may use.
    pub fn update(&mut self, works: &[Option<Work>], parameter_bytes: usize) {
        if works.len() != self.slots.len() || !works.iter().zip(&self.slots).all(|(work, slot)| self.fits(work, slot)) {
            self.build(works, parameter_bytes);
        }
        for (index, work) in works.iter().enumerate() {
            self.set(index, work);
        }
    }

    /// Writes a parameter's addresses into its place.
    fn set(&mut self, index: usize, work: &Option<Work>) {
        let Some(slot) = self.slots[index] else { return };
        let bucket = &mut self.buckets[slot.bucket as usize];
        let table = &mut bucket.tables[slot.table as usize];
        match work {
            None => table.set_addresses(slot.index as usize, &[0; MAX_OPERANDS]),
            // The master comes last, so that variants without one read what is before it.
            Some(Work { tensors, scaling: None, .. }) => table.set_addresses(slot.index as usize, tensors),
            Some(Work { tensors, scaling: Some(scaling), .. }) => {
                let addresses = Addresses { tensors: *tensors, scaling: **scaling };
                table.set_addresses(slot.index as usize, &addresses.pack(&bucket.variant));
            }
        }
    }

    fn build(&mut self, works: &[Option<Work>], parameter_bytes: usize) {
        // A parameter without a gradient keeps its place, so that gradients which come and go settle into one plan.
        let same_length = works.len() == self.slots.len();
        let signatures: Vec<Option<Signature>> = works
            .iter()
            .enumerate()
            .map(|(i, work)| match work {
                Some(work) => Some(work.signature),
                None if same_length => self.slots[i].map(|slot| self.signature(slot)),
                None => None,
            })
            .collect();
        self.buckets.clear();
        self.slots.clear();
        self.built += 1;
        for signature in signatures {
            let slot = signature.map(|signature| {
                let Signature { numel, variant, device } = signature;
                let found = self.buckets.iter().position(|b| b.device == device && b.variant == variant);
                let bucket = found.unwrap_or_else(|| {
                    self.buckets.push(Bucket { device, variant, tables: Vec::new() });
                    self.buckets.len() - 1
                });
                let (table, index) = self.buckets[bucket].push(numel, parameter_bytes);
                Slot { bucket: bucket as u32, table, index }
            });
            self.slots.push(slot);
        }
    }

    fn signature(&self, slot: Slot) -> Signature {
        let bucket = &self.buckets[slot.bucket as usize];
        let numel = bucket.tables[slot.table as usize].numel(slot.index as usize);
        Signature { numel, variant: bucket.variant, device: bucket.device }
    }

    fn fits(&self, work: &Option<Work>, slot: &Option<Slot>) -> bool {
        match (work, slot) {
            (Some(work), Some(slot)) => work.signature == self.signature(*slot),
            (Some(_), None) => false,
            (None, _) => true,
        }
    }

    /// Buckets, in the order of their first parameter.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// How often the group was planned.
    pub fn built(&self) -> u64 {
        self.built
    }

    /// Tensors planned for, and their elements.
    pub fn size(&self) -> (usize, u64) {
        let planned = self.slots.iter().flatten();
        planned.fold((0, 0), |(tensors, elements), &slot| (tensors + 1, elements + self.signature(slot).numel))
    }
}

#[cfg(test)]
mod tests {
    use super::column::Master;
    use super::*;
    use crate::tensor::Dtype;
    use proptest::prelude::*;

    const BYTES: usize = 4096;

    fn work(numel: u64, kind: u8, address: u64) -> Work {
        let (grad, master) = [(Dtype::F32, Master::None), (Dtype::BF16, Master::Remainder), (Dtype::BF16, Master::F32)]
            [usize::from(kind % 3)];
        let (param, moment) = (Dtype::BF16, Dtype::F32);
        let variant = Variant { grad, param, exp_avg: moment, exp_avg_sq: moment, master, capturable: false };
        let device = Device::Cuda(u16::from(kind / 3));
        Work {
            signature: Signature { numel, variant, device },
            tensors: std::array::from_fn(|operand| address + operand as u64),
            scaling: None,
        }
    }

    fn planned(plan: &GroupPlan) -> Vec<(u64, u64)> {
        let tables = plan.buckets().iter().flat_map(|bucket| &bucket.tables);
        let mut rows: Vec<(u64, u64)> = tables
            .flat_map(|t| (0..t.len()).map(|i| (t.addresses(i)[0], t.numel(i))))
            .filter(|row| row.0 != 0)
            .collect();
        rows.sort_unstable();
        rows
    }

    #[test]
    fn gradients_that_come_and_go_settle_into_one_plan() {
        let all: Vec<_> = (0..5).map(|i| Some(work(100 + i, (i % 3) as u8, 10 * i + 10))).collect();
        let mut plan = GroupPlan::default();
        plan.update(&[None, all[1].clone(), None, all[3].clone(), all[4].clone()], BYTES);
        plan.update(&all, BYTES);
        let settled = plan.built();
        for mask in 0..32u32 {
            let works: Vec<_> = (0..5).map(|i| if mask >> i & 1 == 1 { all[i].clone() } else { None }).collect();
            plan.update(&works, BYTES);
            let expected: Vec<_> = works.iter().flatten().map(|w| (w.tensors[0], w.signature.numel)).collect();
            assert_eq!(planned(&plan), expected);
        }
        assert_eq!(plan.built(), settled);
    }

    #[test]
    fn another_gradient_dtype_is_planned_anew() {
        let mut plan = GroupPlan::default();
        plan.update(&[Some(work(7, 1, 10))], BYTES);
        plan.update(&[Some(work(7, 0, 10))], BYTES);
        assert_eq!(plan.built(), 2);
        assert_eq!(plan.buckets().len(), 1);
        assert_eq!(plan.buckets()[0].variant.grad, Dtype::F32);
    }

    proptest! {
        #[test]
        fn each_parameter_with_work_is_launched_exactly_once_with_this_steps_addresses(
            steps in prop::collection::vec(
                prop::collection::vec(prop::option::weighted(0.8, (1u64..30_000, 0u8..6)), 0..200), 1..5),
        ) {
            let mut plan = GroupPlan::default();
            for (step, kinds) in steps.iter().enumerate() {
                let works: Vec<Option<Work>> = kinds.iter().enumerate()
                    .map(|(i, kind)| kind.map(|(numel, kind)| work(numel, kind, (step as u64 + 1) << 32 | (i as u64 * 8 + 8))))
                    .collect();
                plan.update(&works, BYTES);
                let expected: Vec<_> = works.iter().flatten().map(|w| (w.tensors[0], w.signature.numel)).collect();
                prop_assert_eq!(planned(&plan), expected);
                for bucket in plan.buckets() {
                    let limit = capacity(BYTES, bucket.variant.operands());
                    prop_assert!(bucket.tables.iter().all(|t| t.len() <= limit));
                }
            }
        }
    }
}
