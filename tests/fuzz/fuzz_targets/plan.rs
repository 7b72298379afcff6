//! Steps of one group with tensors of any description: what is planned is what was checked, and nothing else.

#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use te_patches_core::plan::GroupPlan;
use te_patches_core::plan::column::{Column, Master, Variant, Verdict, Work};
use te_patches_core::tensor::{Device, Dtype, View};

const DTYPES: [Dtype; 5] = [Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::I16, Dtype::E4M3];
const MASTERS: [Master; 5] = [Master::None, Master::F32, Master::F16, Master::F16Idle, Master::Remainder];
const DEVICES: [Device; 3] = [Device::Cpu, Device::Cuda(0), Device::Other];

#[derive(Arbitrary, Debug)]
struct Tensor {
    rows: u8,
    columns: u8,
    transposed: bool,
    dtype: u8,
    device: u8,
}

#[derive(Arbitrary, Debug)]
struct Param {
    /// As few differences as most parameters have: what the first is, all are, but for what `odd` says.
    first: Tensor,
    odd: [Option<Tensor>; 4],
    dtypes: [u8; 5],
    kind: u8,
    capturable: bool,
}

#[derive(Arbitrary, Debug)]
struct Steps {
    steps: Vec<Vec<Option<Param>>>,
    large: bool,
}

fn view(tensor: &Tensor, dtype: Dtype, address: u64) -> View {
    let (rows, columns) = (i64::from(tensor.rows), i64::from(tensor.columns) * 300);
    let strides = if tensor.transposed { [1, rows] } else { [columns, 1] };
    View::new(address, &[rows, columns], &strides, dtype, DEVICES[usize::from(tensor.device % 8) / 3])
}

fn column(param: &Param, address: u64) -> Column {
    let pick = |at: u8| DTYPES[usize::from(at) % DTYPES.len()];
    let moments = [pick(param.dtypes[2]), pick(param.dtypes[3])];
    let dtypes = [pick(param.dtypes[0]), pick(param.dtypes[1]), moments[0], moments[1], pick(param.dtypes[4])];
    let views: [View; 5] = std::array::from_fn(|role| {
        let odd = role.checked_sub(1).and_then(|at| param.odd[at].as_ref());
        let dtype = odd.map_or(dtypes[role], |tensor| pick(tensor.dtype));
        view(odd.unwrap_or(&param.first), dtype, address + role as u64)
    });
    let kind = MASTERS[usize::from(param.kind) % MASTERS.len()];
    let [grad, param_view, exp_avg, exp_avg_sq, master] = views;
    let [exp_avg_dtype, exp_avg_sq_dtype] = moments;
    let variant = Variant {
        grad: grad.dtype,
        param: param_view.dtype,
        exp_avg: exp_avg_dtype,
        exp_avg_sq: exp_avg_sq_dtype,
        master: kind,
        capturable: param.capturable,
    };
    Column {
        grad,
        param: param_view,
        exp_avg,
        exp_avg_sq,
        master: (kind != Master::None).then_some(master),
        scaling: variant.is_scaled().then(Box::default),
        kind,
        moments,
        capturable: param.capturable,
    }
}

fuzz_target!(|input: Steps| {
    let mut plan = GroupPlan::default();
    let bytes = if input.large { 32_764 } else { 4096 };
    for (step, params) in input.steps.iter().enumerate() {
        let works: Vec<Option<Work>> = params
            .iter()
            .enumerate()
            .map(|(at, param)| {
                let column = column(param.as_ref()?, ((step as u64 + 1) << 40) | (at as u64 * 8 + 8));
                match column.check() {
                    Ok(Verdict::Ready(work)) => {
                        assert!(column.grad.numel == column.param.numel && column.exp_avg.numel == column.param.numel);
                        assert!(column.grad.device == column.exp_avg_sq.device && column.grad.device != Device::Other);
                        assert_eq!([column.exp_avg.dtype, column.exp_avg_sq.dtype], column.moments);
                        Some(work)
                    }
                    _ => None,
                }
            })
            .collect();
        plan.update(&works, bytes);
        let mut planned: Vec<(u64, u64)> = Vec::new();
        for bucket in plan.buckets() {
            for table in &bucket.tables {
                for tensor in (0..table.len()).filter(|&tensor| table.addresses(tensor)[0] != 0) {
                    planned.push((table.addresses(tensor)[0], table.numel(tensor)));
                }
            }
        }
        planned.sort_unstable();
        let expected: Vec<_> = works.iter().flatten().map(|work| (work.tensors[0], work.signature.numel)).collect();
        assert_eq!(planned, expected);
    }
});
