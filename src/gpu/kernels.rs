//! The Adam kernels: their sources, options, compiled forms and whether they were shown equal to stock's.
//! Invariant: a kernel is compiled and loaded once per device, variant and capacity.

use std::collections::HashMap;

use anyhow::{Result, bail};

use crate::gpu::cache::Cache;
use crate::gpu::driver::{Function, Gpu, Stream};
use crate::gpu::nvrtc::{self, Compiled, File};
use crate::options::Header;
use crate::plan::column::{Master, Role, Variant};
use crate::plan::operands::Scaled;
use crate::plan::table::{CHUNK, Table, capacity};

const SOURCE: File = ("adam.cu", include_str!("../../kernels/adam.cu"));
const HEADERS: [File; 5] = [
    ("access.cuh", include_str!("../../kernels/access.cuh")),
    ("arithmetic.cuh", include_str!("../../kernels/arithmetic.cuh")),
    ("convert.cuh", include_str!("../../kernels/convert.cuh")),
    ("launch.cuh", include_str!("../../kernels/launch.cuh")),
    ("scaling.cuh", include_str!("../../kernels/scaling.cuh")),
];

/// Bytes per tensor of what a first pass leaves for the second: `Found` of `launch.cuh`.
pub const FOUND_BYTES: usize = 24;

/// Bytes of kernel parameters that every driver takes.
pub const SMALL_PARAMETERS: usize = 4096;
/// Bytes that CUDA 12.1 and later take.
pub const LARGE_PARAMETERS: usize = 32764;
const LARGE_PARAMETERS_SINCE: i32 = 12010;
/// bf16 conversions are instructions from this architecture on.
const OLDEST_ARCH: i32 = 80;

/// Threads of a block.
const THREADS: u32 = 256;

/// Options that compile one kernel.
pub fn options(variant: Variant, parameter_bytes: usize, arch: i32) -> Vec<String> {
    let name = |dtype: crate::tensor::Dtype| dtype.kernel_name().unwrap_or("unsupported");
    let master = match variant.master {
        Master::None => 0,
        Master::F32 => 1,
        Master::Remainder => 2,
        Master::F16 => 3,
        Master::F16Idle => 4,
    };
    let scaling = |role| match variant.scaled(role) {
        Scaled::No => 0,
        Scaled::Factor => 1,
        Scaled::State => 2,
        Scaled::Param => 3,
    };
    // The fastest of benches/tune.py on an H200, together with THREADS and CHUNK.
    let (vector, unroll) = (4, 2);
    vec![
        format!("--gpu-architecture=sm_{arch}"),
        "--std=c++17".to_owned(),
        "--ptxas-options=-v".to_owned(),
        format!("-DGRAD={}", name(variant.grad)),
        format!("-DPARAM={}", name(variant.param)),
        format!("-DEXP_AVG={}", name(variant.exp_avg)),
        format!("-DEXP_AVG_SQ={}", name(variant.exp_avg_sq)),
        format!("-DMASTER={master}"),
        format!("-DPARAM_SCALING={}", scaling(Role::Param)),
        format!("-DEXP_AVG_SCALING={}", scaling(Role::ExpAvg)),
        format!("-DEXP_AVG_SQ_SCALING={}", scaling(Role::ExpAvgSq)),
        format!("-DCAPTURABLE={}", u8::from(variant.capturable)),
        format!("-DCAPACITY={}", capacity(parameter_bytes, variant.operands())),
        format!("-DTHREADS={THREADS}"),
        format!("-DVECTOR={vector}"),
        format!("-DUNROLL={unroll}"),
        format!("-DCHUNK={CHUNK}"),
    ]
}

/// Compiles a kernel without a device.
pub fn compile(options: &[String]) -> Result<Compiled> {
    nvrtc::compile(SOURCE, &HEADERS, options)
}

/// What is known of a variant's arithmetic on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// Its results were stock's, bit for bit.
    Equal,
    /// It cannot or must not be used, and why.
    Unusable(String),
}

/// The functions of one variant.
#[derive(Clone, Copy)]
struct Loaded {
    update: Function,
    /// The pass before it, over states that are scaled.
    absmax: Option<Function>,
}

/// The kernels of one device.
pub struct Kernels {
    gpu: Gpu,
    cache: Cache,
    compiler: String,
    parameter_bytes: usize,
    loaded: HashMap<(Variant, usize), Loaded>,
    proofs: HashMap<Variant, Proof>,
    parameter: Vec<u64>,
}

impl Kernels {
    /// The kernels of the device with this ordinal, none compiled yet.
    pub fn new(ordinal: u16) -> Result<Kernels> {
        let gpu = Gpu::new(ordinal)?;
        if gpu.arch < OLDEST_ARCH {
            bail!("compute capability {} is older than 8.0, the oldest that the kernels are written for", gpu.arch);
        }
        let (major, minor) = nvrtc::version()?;
        let large = gpu.driver.min(1000 * major + 10 * minor) >= LARGE_PARAMETERS_SINCE;
        Ok(Kernels {
            gpu,
            cache: Cache::from_environment(),
            compiler: format!("NVRTC {major}.{minor}"),
            parameter_bytes: if large { LARGE_PARAMETERS } else { SMALL_PARAMETERS },
            loaded: HashMap::new(),
            proofs: HashMap::new(),
            parameter: Vec::new(),
        })
    }

    /// Bytes of kernel parameters a launch on this device can have.
    pub fn parameter_bytes(&self) -> usize {
        self.parameter_bytes
    }

    /// Compiles and loads what launching `table` takes, so that the launch itself cannot fail for want of it.
    pub fn prepare(&mut self, variant: Variant, table: &Table) -> Result<()> {
        self.function(variant, table).map(|_| ())
    }

    /// What is known of the variant.
    pub fn proof(&self, variant: Variant) -> Option<&Proof> {
        self.proofs.get(&variant)
    }

    /// Remembers what a comparison with stock showed.
    pub fn record(&mut self, variant: Variant, proof: Proof) {
        self.proofs.insert(variant, proof);
    }

    /// All that is known, for reports.
    pub fn proofs(&self) -> impl Iterator<Item = (&Variant, &Proof)> {
        self.proofs.iter()
    }

    /// Runs one table; returns the number of launches. `header.found` is the address of `FOUND_BYTES` per tensor if the
    /// variant takes two passes.
    ///
    /// # Safety
    /// Every tensor with a gradient has `numel` elements of the variant's types at its addresses, valid on `stream`.
    pub unsafe fn launch(&mut self, variant: Variant, table: &Table, header: &Header, stream: Stream) -> Result<u64> {
        let (loaded, bytes) = self.function(variant, table)?;
        table.write_parameter(header, capacity(bytes, variant.operands()), &mut self.parameter);
        let launch = |function| {
            // SAFETY: the parameter was written for this kernel's capacity; the addresses are the caller's promise.
            unsafe { self.gpu.launch(function, table.chunks(), THREADS, stream, &self.parameter) }
        };
        if let Some(absmax) = loaded.absmax {
            // SAFETY: the caller's promise.
            unsafe { self.gpu.clear(header.found, FOUND_BYTES * table.len(), stream) }?;
            launch(absmax)?;
        }
        launch(loaded.update)?;
        Ok(1 + u64::from(loaded.absmax.is_some()))
    }

    /// The kernel for a table: the smallest parameter that holds it, since the driver copies all of it.
    fn function(&mut self, variant: Variant, table: &Table) -> Result<(Loaded, usize)> {
        let small = table.len() <= capacity(SMALL_PARAMETERS, variant.operands());
        let bytes = if small { SMALL_PARAMETERS } else { LARGE_PARAMETERS };
        if let Some(&loaded) = self.loaded.get(&(variant, bytes)) {
            return Ok((loaded, bytes));
        }
        let options = options(variant, bytes, self.gpu.arch);
        let mut key = vec![self.compiler.as_bytes(), SOURCE.1.as_bytes()];
        key.extend(HEADERS.iter().map(|file| file.1.as_bytes()));
        key.extend(options.iter().map(|option| option.as_bytes()));
        let cubin = self.cache.get_or(&key, || compile(&options).map(|compiled| compiled.cubin))?;
        let names = if variant.two_passes() { &["adam", "adam_absmax"][..] } else { &["adam"] };
        let functions = self.gpu.load(&cubin, names)?;
        let loaded = Loaded { update: functions[0], absmax: functions.get(1).copied() };
        self.loaded.insert((variant, bytes), loaded);
        Ok((loaded, bytes))
    }
}

/// Every variant there is, for tests that compile them all.
pub fn all_variants() -> Vec<Variant> {
    use crate::tensor::Dtype::{BF16, E4M3, E5M2, F16, F32};
    let mut variants = Vec::new();
    for (param, masters) in [
        (F32, &[Master::None, Master::F16, Master::F16Idle][..]),
        (F16, &[Master::None, Master::F32, Master::F16]),
        (BF16, &[Master::None, Master::F32, Master::F16, Master::Remainder]),
        (E4M3, &[Master::F32, Master::F16]),
        (E5M2, &[Master::F32, Master::F16]),
    ] {
        for &master in masters {
            for grad in [F32, F16, BF16] {
                for exp_avg in [F32, F16, BF16, E4M3] {
                    for exp_avg_sq in [F32, F16, BF16, E4M3] {
                        let variant = Variant { grad, param, exp_avg, exp_avg_sq, master, capturable: false };
                        variants.push(variant);
                        // Transformer Engine's capturable kernels take fp32 or bf16 moments, both alike, and fp32 masters.
                        let moments = exp_avg == exp_avg_sq && matches!(exp_avg, F32 | BF16);
                        let value = matches!(param, F32 | F16 | BF16) && matches!(master, Master::None | Master::F32);
                        if moments && value {
                            variants.push(Variant { capturable: true, ..variant });
                        }
                    }
                }
            }
        }
    }
    variants
}
