//! The Adam kernels: their sources, options, compiled forms and whether they were shown equal to stock's.
//! Invariant: a kernel is compiled and loaded once per device, variant and capacity.

use std::collections::HashMap;

use anyhow::{Result, bail};

use crate::gpu::cache::Cache;
use crate::gpu::driver::{Function, Gpu, Stream};
use crate::gpu::nvrtc::{self, Compiled, File};
use crate::options::Header;
use crate::plan::column::{Master, Variant};
use crate::plan::table::{CHUNK, Table, capacity};

const SOURCE: File = ("adam.cu", include_str!("../../kernels/adam.cu"));
const HEADERS: [File; 3] = [
    ("access.cuh", include_str!("../../kernels/access.cuh")),
    ("arithmetic.cuh", include_str!("../../kernels/arithmetic.cuh")),
    ("convert.cuh", include_str!("../../kernels/convert.cuh")),
];

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
    };
    // The fastest of benches/tune.py on an H200, together with THREADS and CHUNK.
    let (vector, unroll) = (4, 2);
    vec![
        format!("--gpu-architecture=sm_{arch}"),
        "--std=c++17".to_owned(),
        "--ptxas-options=-v".to_owned(),
        format!("-DGRAD={}", name(variant.grad)),
        format!("-DPARAM={}", name(variant.param)),
        format!("-DMOMENT={}", name(variant.moment)),
        format!("-DMASTER={master}"),
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

/// The kernels of one device.
pub struct Kernels {
    gpu: Gpu,
    cache: Cache,
    compiler: String,
    parameter_bytes: usize,
    loaded: HashMap<(Variant, usize), Function>,
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

    /// Runs one table.
    ///
    /// # Safety
    /// Every tensor with a gradient has `numel` elements of the variant's types at its addresses, valid on `stream`.
    pub unsafe fn launch(&mut self, variant: Variant, table: &Table, header: &Header, stream: Stream) -> Result<()> {
        let (function, bytes) = self.function(variant, table)?;
        let operands = variant.operands();
        table.write_parameter(header, operands, capacity(bytes, operands), &mut self.parameter);
        // SAFETY: the parameter was written for this kernel's capacity; the addresses are the caller's promise.
        unsafe { self.gpu.launch(function, table.chunks(), THREADS, stream, &self.parameter) }
    }

    /// The kernel for a table: the smallest parameter that holds it, since the driver copies all of it.
    fn function(&mut self, variant: Variant, table: &Table) -> Result<(Function, usize)> {
        let small = table.len() <= capacity(SMALL_PARAMETERS, variant.operands());
        let bytes = if small { SMALL_PARAMETERS } else { LARGE_PARAMETERS };
        if let Some(&function) = self.loaded.get(&(variant, bytes)) {
            return Ok((function, bytes));
        }
        let options = options(variant, bytes, self.gpu.arch);
        let mut key = vec![self.compiler.as_bytes(), SOURCE.1.as_bytes()];
        key.extend(HEADERS.iter().map(|file| file.1.as_bytes()));
        key.extend(options.iter().map(|option| option.as_bytes()));
        let cubin = self.cache.get_or(&key, || compile(&options).map(|compiled| compiled.cubin))?;
        let function = self.gpu.load(&cubin, "adam")?;
        self.loaded.insert((variant, bytes), function);
        Ok((function, bytes))
    }
}

/// Every variant there is, for tests that compile them all.
pub fn all_variants() -> Vec<Variant> {
    use crate::tensor::Dtype::{BF16, F16, F32};
    let mut variants = Vec::new();
    for (param, masters) in [
        (F32, &[Master::None][..]),
        (F16, &[Master::None, Master::F32]),
        (BF16, &[Master::None, Master::F32, Master::Remainder]),
    ] {
        for &master in masters {
            for grad in [F32, F16, BF16] {
                for moment in [F32, BF16] {
                    let variant = Variant { grad, param, moment, master, capturable: false };
                    variants.push(variant);
                    // Transformer Engine has no capturable remainders.
                    if master != Master::Remainder {
                        variants.push(Variant { capturable: true, ..variant });
                    }
                }
            }
        }
    }
    variants
}
