//! What the plan knows of a tensor: plain numbers, no references.
//! Knows nothing of Python, CUDA or Adam. Invariant: two views with equal shape and equal `Layout`, neither
//! `Layout::SCATTERED`, hold their elements in the same memory order.

use std::fmt;

/// Storage type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// 16-bit integer: the remainder of an fp32 master.
    I16,
    /// 32-bit integer: a step or flag on the device.
    I32,
    /// Bytes whose meaning their owner knows: the data of an fp8 tensor.
    U8,
    /// fp8 with 4 bits of exponent.
    E4M3,
    /// fp8 with 5 bits of exponent.
    E5M2,
    /// IEEE binary64: no kernel takes it.
    F64,
    /// Anything else: no kernel takes it.
    Other,
}

impl Dtype {
    /// The kernels' name of a floating type they read or write.
    pub fn kernel_name(self) -> Option<&'static str> {
        match self {
            Dtype::F32 => Some("F32"),
            Dtype::F16 => Some("F16"),
            Dtype::BF16 => Some("BF16"),
            Dtype::E4M3 => Some("E4M3"),
            Dtype::E5M2 => Some("E5M2"),
            Dtype::I16 | Dtype::I32 | Dtype::U8 | Dtype::F64 | Dtype::Other => None,
        }
    }

    /// Bytes of an element; the most there can be for types without a name here.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::BF16 | Dtype::I16 => 2,
            Dtype::U8 | Dtype::E4M3 | Dtype::E5M2 => 1,
            Dtype::F64 => 8,
            Dtype::Other => 16,
        }
    }

    /// Whether a gradient can have it.
    pub fn is_gradient(self) -> bool {
        matches!(self, Dtype::F32 | Dtype::F16 | Dtype::BF16)
    }

    /// torch's name.
    pub fn torch_name(self) -> &'static str {
        match self {
            Dtype::F32 => "float32",
            Dtype::F16 => "float16",
            Dtype::BF16 => "bfloat16",
            Dtype::I16 => "int16",
            Dtype::I32 => "int32",
            Dtype::U8 => "uint8",
            Dtype::E4M3 => "float8_e4m3fn",
            Dtype::E5M2 => "float8_e5m2",
            Dtype::F64 => "float64",
            Dtype::Other => "another dtype",
        }
    }
}

/// Where a tensor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory.
    Cpu,
    /// CUDA device of this ordinal.
    Cuda(u16),
    /// Anything else.
    Other,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => write!(f, "cpu"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
            Device::Other => write!(f, "another device"),
        }
    }
}

/// The order of a tensor's elements in memory, as a number that is equal for equal orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout(u64);

impl Layout {
    /// Row-major without gaps.
    pub const CONTIGUOUS: Layout = Layout(0);
    /// With gaps or with elements that share memory (slices, expanded tensors).
    pub const SCATTERED: Layout = Layout(1);
}

/// One tensor as the kernels see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Address of the first element.
    pub address: u64,
    /// Number of elements.
    pub numel: u64,
    /// Elements from the first to the last in memory, gaps included.
    pub span: u64,
    /// Hash of the shape.
    pub shape: u64,
    /// Address of the shape: part of torch's record of the tensor.
    pub record: u64,
    /// Memory order.
    pub layout: Layout,
    /// Storage type.
    pub dtype: Dtype,
    /// Device.
    pub device: Device,
}

impl View {
    /// A view of `shape` and `strides` (in elements) at `address`.
    pub fn new(address: u64, shape: &[i64], strides: &[i64], dtype: Dtype, device: Device) -> View {
        let mut numel: i64 = 1;
        let mut contiguous = true;
        let mut hash = FNV_START;
        for (&size, &stride) in shape.iter().zip(strides).rev() {
            contiguous &= size == 1 || stride == numel;
            numel *= size;
            hash = fnv(hash, size);
        }
        let layout = if contiguous || numel == 0 { Layout::CONTIGUOUS } else { dense_layout(shape, strides) };
        let record = shape.as_ptr() as u64;
        let numel = numel as u64;
        let reach = |(&size, &stride): (&i64, &i64)| ((size - 1) * stride) as u64;
        let span =
            if layout == Layout::SCATTERED { 1 + shape.iter().zip(strides).map(reach).sum::<u64>() } else { numel };
        View { address, numel, span, shape: hash, record, layout, dtype, device }
    }
}

const FNV_START: u64 = 0xcbf2_9ce4_8422_2325;

fn fnv(hash: u64, value: i64) -> u64 {
    (hash ^ value as u64).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(17)
}

/// Layout of a tensor that is not row-major: a hash of its strides if it is dense, else `SCATTERED`.
fn dense_layout(shape: &[i64], strides: &[i64]) -> Layout {
    let mut dims: Vec<(i64, i64)> = shape.iter().zip(strides).map(|(&n, &s)| (s, n)).filter(|&(_, n)| n != 1).collect();
    let hash = dims.iter().fold(FNV_START, |hash, &(stride, size)| fnv(fnv(hash, stride), size));
    dims.sort_unstable();
    let mut expected = 1;
    for (stride, size) in dims {
        if stride != expected {
            return Layout::SCATTERED;
        }
        expected *= size;
    }
    Layout(hash.max(2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn view(shape: &[i64], strides: &[i64]) -> View {
        View::new(16, shape, strides, Dtype::F32, Device::Cpu)
    }

    #[test]
    fn size_one_dimensions_do_not_change_the_layout() {
        assert_eq!(view(&[2, 1, 100], &[100, 1, 1]).layout, Layout::CONTIGUOUS);
        assert_eq!(view(&[2, 1, 100], &[100, 100, 1]).layout, Layout::CONTIGUOUS);
    }

    #[test]
    fn transposed_and_channels_last_are_dense_but_not_contiguous() {
        let transposed = view(&[3, 5], &[1, 3]).layout;
        assert_ne!(transposed, Layout::CONTIGUOUS);
        assert_ne!(transposed, Layout::SCATTERED);
        assert_eq!(transposed, view(&[3, 5], &[1, 3]).layout);
        assert_ne!(view(&[8, 4, 3, 3], &[36, 1, 12, 4]).layout, Layout::SCATTERED);
    }

    #[test]
    fn slices_and_expanded_tensors_are_scattered() {
        assert_eq!(view(&[4, 3], &[6, 1]).layout, Layout::SCATTERED);
        assert_eq!(view(&[4096], &[0]).layout, Layout::SCATTERED);
        assert_eq!(view(&[4], &[2]).layout, Layout::SCATTERED);
        assert_eq!([view(&[4, 3], &[6, 1]).span, view(&[4096], &[0]).span, view(&[4], &[2]).span], [21, 1, 7]);
    }

    #[test]
    fn empty_tensors_are_contiguous_whatever_their_strides() {
        assert_eq!(view(&[0, 64], &[7, 3]).layout, Layout::CONTIGUOUS);
        assert_eq!(view(&[0, 64], &[7, 3]).numel, 0);
    }

    proptest! {
        #[test]
        fn a_permuted_contiguous_tensor_is_dense(sizes in prop::collection::vec(0i64..5, 1..5), seed in 0usize..24) {
            let mut strides = vec![1; sizes.len()];
            for d in (0..sizes.len() - 1).rev() { strides[d] = strides[d + 1] * sizes[d + 1].max(1); }
            let mut order: Vec<usize> = (0..sizes.len()).collect();
            let turn = seed % sizes.len();
            order.rotate_left(turn);
            let shape: Vec<i64> = order.iter().map(|&d| sizes[d]).collect();
            let permuted: Vec<i64> = order.iter().map(|&d| strides[d]).collect();
            let result = view(&shape, &permuted);
            prop_assert_ne!(result.layout, Layout::SCATTERED);
            prop_assert_eq!(result.numel, sizes.iter().product::<i64>() as u64);
        }
    }
}
