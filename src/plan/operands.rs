//! What a kernel is given of each tensor: one address per operand, in the kernel's order.
//! Numbers only. Invariant: `pack` and `unpack` are inverse for the operands that a variant has; the order is that of
//! `kernels/launch.cuh`.

use crate::plan::column::{Master, Role, Variant};
use crate::tensor::Dtype;

/// Operands that a kernel can have per tensor: five tensors, and the scaling of each but the gradient.
pub const MAX_OPERANDS: usize = ROLES + 3 + 4 + 4 + 1;
/// Tensors that an update reads or writes.
pub const ROLES: usize = 5;

/// Addresses of the numbers, one fp32 element each, that scale a tensor; 0 where the tensor has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scaling {
    /// What stored fp16 is multiplied by to read it; kept beside fp8 states too.
    pub factor: u64,
    /// What values are multiplied by to make fp8 of them: the quantizer's scale.
    pub scale: u64,
    /// What stored fp8 is multiplied by to read it.
    pub scale_inv: u64,
    /// Largest magnitude that the quantizer saw.
    pub amax: u64,
}

/// How a tensor is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scaled {
    /// Not at all.
    No,
    /// fp16 state: by a factor that follows from its largest magnitude.
    Factor,
    /// fp8 state: by a quantizer whose scale follows from its largest magnitude.
    State,
    /// fp8 parameter: by a quantizer whose scale is given.
    Param,
}

impl Variant {
    /// How the tensor in this role is scaled.
    pub fn scaled(&self, role: Role) -> Scaled {
        let moment = |dtype| match dtype {
            Dtype::F16 => Scaled::Factor,
            Dtype::E4M3 => Scaled::State,
            _ => Scaled::No,
        };
        match role {
            Role::Grad => Scaled::No,
            Role::Param if matches!(self.param, Dtype::E4M3 | Dtype::E5M2) => Scaled::Param,
            Role::Param => Scaled::No,
            Role::ExpAvg => moment(self.exp_avg),
            Role::ExpAvgSq => moment(self.exp_avg_sq),
            Role::Master if matches!(self.master, Master::F16 | Master::F16Idle) => Scaled::Factor,
            Role::Master => Scaled::No,
        }
    }

    /// Whether a pass over new magnitudes comes before the one that writes.
    pub fn two_passes(&self) -> bool {
        Role::ALL.iter().any(|&role| matches!(self.scaled(role), Scaled::Factor | Scaled::State))
    }

    /// Whether any tensor is scaled.
    pub fn is_scaled(&self) -> bool {
        Role::ALL.iter().any(|&role| self.scaled(role) != Scaled::No)
    }

    fn has(&self, role: Role) -> bool {
        role != Role::Master || self.master != Master::None
    }

    /// Addresses a tensor has in the kernel's table.
    pub fn operands(&self) -> usize {
        let words = |&role: &Role| {
            let scaling = match self.scaled(role) {
                Scaled::No => 0,
                Scaled::Factor => 1,
                Scaled::State => 4,
                Scaled::Param => 3,
            };
            usize::from(self.has(role)) + scaling
        };
        Role::ALL.iter().map(words).sum()
    }
}

/// The operands of one parameter's update, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Addresses {
    /// Tensors in the order of [`Role::ALL`].
    pub tensors: [u64; ROLES],
    /// Their scaling, in the same order.
    pub scaling: [Scaling; ROLES],
}

impl Addresses {
    /// In the order of a variant's kernel; as many as it has operands, then zeros.
    pub fn pack(mut self, variant: &Variant) -> [u64; MAX_OPERANDS] {
        let mut packed = [0; MAX_OPERANDS];
        let mut words = packed.iter_mut();
        self.visit(variant, |word| {
            if let Some(slot) = words.next() {
                *slot = *word;
            }
        });
        packed
    }

    /// From the order of a variant's kernel.
    pub fn unpack(variant: &Variant, packed: &[u64]) -> Addresses {
        let mut addresses = Addresses::default();
        let mut words = packed.iter();
        addresses.visit(variant, |word| *word = words.next().copied().unwrap_or(0));
        addresses
    }

    fn visit(&mut self, variant: &Variant, mut each: impl FnMut(&mut u64)) {
        for role in Role::ALL.into_iter().filter(|&role| variant.has(role)) {
            each(&mut self.tensors[role as usize]);
        }
        for role in Role::ALL {
            let Scaling { factor, scale, scale_inv, amax } = &mut self.scaling[role as usize];
            match variant.scaled(role) {
                Scaled::No => {}
                Scaled::Factor => each(factor),
                Scaled::State => [factor, scale, scale_inv, amax].into_iter().for_each(&mut each),
                Scaled::Param => [scale, scale_inv, amax].into_iter().for_each(&mut each),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::kernels::all_variants;

    #[test]
    fn every_variant_packs_all_its_operands_and_nothing_else() {
        for variant in all_variants() {
            let count = variant.operands();
            let words: Vec<u64> = (1..=count as u64).collect();
            let packed = Addresses::unpack(&variant, &words).pack(&variant);
            assert_eq!(packed[..count], words);
            assert!(packed[count..].iter().all(|&word| word == 0));
        }
    }

    #[test]
    fn tensors_come_first_in_the_order_of_their_roles() {
        for variant in all_variants() {
            let addresses = Addresses { tensors: [1, 2, 3, 4, 5], ..Addresses::default() };
            assert_eq!(addresses.pack(&variant)[..4], [1, 2, 3, 4]);
        }
    }
}
