//! Micro-benchmarks of the Rust core, by criterion: `cargo bench`. Times of a plan, a launch's table and a load's cuts for
//! 10 to 100,000 tensors, and of the CPU kernels for one tensor of 1,048,576 elements.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use te_patches_core::cpu::kernels::adam;
use te_patches_core::loader::overlap::{Extent, shared};
use te_patches_core::loader::pieces::{Size, portions};
use te_patches_core::options::{Header, Options};
use te_patches_core::plan::GroupPlan;
use te_patches_core::plan::column::{Master, Signature, Variant, Work};
use te_patches_core::plan::operands::ROLES;
use te_patches_core::plan::table::capacity;
use te_patches_core::tensor::{Device, Dtype, View};

const PARAMETER_BYTES: usize = 32764;
const TENSORS: [usize; 5] = [10, 100, 1_000, 10_000, 100_000];

fn variant(dtype: Dtype, master: Master) -> Variant {
    let moment = Dtype::F32;
    Variant { grad: dtype, param: dtype, exp_avg: moment, exp_avg_sq: moment, master, capturable: false }
}

fn header() -> Header {
    Header::new(&Options {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        bias_correction: true,
        adam_w: true,
        step: 7,
    })
}

fn works(count: usize) -> Vec<Option<Work>> {
    let variant = variant(Dtype::BF16, Master::Remainder);
    let work = |at: usize| {
        let signature = Signature { numel: 4096 + at as u64 % 7, variant, device: Device::Cuda(0) };
        Some(Work {
            signature,
            tensors: std::array::from_fn(|role| (1 + at * ROLES + role) as u64 * 512),
            scaling: None,
        })
    };
    (0..count).map(work).collect()
}

fn plans(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    for count in TENSORS {
        let works = works(count);
        group.throughput(Throughput::Elements(count as u64));
        group.bench_with_input(BenchmarkId::new("made", count), &works, |bench, works| {
            bench.iter(|| {
                let mut plan = GroupPlan::default();
                plan.update(works, PARAMETER_BYTES);
                plan
            });
        });
        let mut plan = GroupPlan::default();
        plan.update(&works, PARAMETER_BYTES);
        group.bench_with_input(BenchmarkId::new("given this step's addresses", count), &works, |bench, works| {
            bench.iter(|| plan.update(works, PARAMETER_BYTES));
        });
        let (header, mut words) = (header(), Vec::new());
        group.bench_with_input(BenchmarkId::new("written as kernel parameters", count), &plan, |bench, plan| {
            bench.iter(|| {
                for bucket in plan.buckets() {
                    let capacity = capacity(PARAMETER_BYTES, bucket.variant.operands());
                    bucket.tables.iter().for_each(|table| table.write_parameter(&header, capacity, &mut words));
                }
            });
        });
    }
    group.finish();
}

fn loads(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("load");
    for count in TENSORS {
        let view = |at: usize| View::new(4096 * (1 + at as u64), &[1024], &[1], Dtype::F32, Device::Cuda(0));
        let extents: Vec<Option<Extent>> = (0..count).map(|at| Extent::of(&view(at))).collect();
        group.throughput(Throughput::Elements(count as u64));
        group.bench_with_input(BenchmarkId::new("shared memory looked for", count), &extents, |bench, extents| {
            bench.iter(|| shared(extents, extents, &[]));
        });
        let sizes = vec![Size { numel: 4096, bytes: 4, two_passes: false }; count];
        group.bench_with_input(BenchmarkId::new("cut into portions", count), &sizes, |bench, sizes| {
            bench.iter(|| portions(sizes, 16 << 20));
        });
    }
    group.finish();
}

fn kernels(criterion: &mut Criterion) {
    const NUMEL: usize = 1 << 20;
    let mut group = criterion.benchmark_group("cpu kernel");
    for (dtype, master, moved) in [(Dtype::F32, Master::None, 28), (Dtype::BF16, Master::Remainder, 26)] {
        let variant = variant(dtype, master);
        // The bits of small normal numbers, as fp32 or as two of bf16.
        let mut memory = vec![vec![0x3c23_3c23u32; NUMEL]; ROLES];
        let tensors = std::array::from_fn(|role| memory[role].as_mut_ptr() as u64);
        let signature = Signature { numel: NUMEL as u64, variant, device: Device::Cpu };
        let mut plan = GroupPlan::default();
        plan.update(&[Some(Work { signature, tensors, scaling: None })], PARAMETER_BYTES);
        let header = header();
        group.throughput(Throughput::Bytes(moved * NUMEL as u64));
        group.bench_function(variant.name(), |bench| {
            bench.iter(|| {
                for table in plan.buckets().iter().flat_map(|bucket| &bucket.tables) {
                    // SAFETY: every address is that of as many elements in `memory`, of which nothing else is used.
                    unsafe { adam(table, variant, &header) };
                }
            });
        });
    }
    group.finish();
}

criterion_group!(core, plans, loads, kernels);
criterion_main!(core);
