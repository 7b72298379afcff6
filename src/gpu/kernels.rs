//! The kernels, Adam's and those that copy between storages: their sources, options, compiled forms, and which were
//! shown equal to stock's.
//! Invariant: a kernel is compiled and loaded once per device, variant and capacity.

use std::collections::HashMap;

use anyhow::{Result, bail};

use crate::gpu::cache::Cache;
use crate::gpu::driver::{Function, Gpu, Stream};
use crate::gpu::nvrtc::{self, Compiled, File};
use crate::loader::Cast;
use crate::options::Header;
use crate::plan::column::{Master, Role, Variant};
use crate::plan::operands::Scaled;
use crate::plan::table::{CHUNK, Table, capacity};
use crate::tensor::Dtype;

const ADAM: File = ("adam.cu", include_str!("../../kernels/adam.cu"));
const CAST: File = ("cast.cu", include_str!("../../kernels/cast.cu"));
const HEADERS: [File; 7] = [
    ("access.cuh", include_str!("../../kernels/access.cuh")),
    ("arithmetic.cuh", include_str!("../../kernels/arithmetic.cuh")),
    ("chunk.cuh", include_str!("../../kernels/chunk.cuh")),
    ("convert.cuh", include_str!("../../kernels/convert.cuh")),
    ("launch.cuh", include_str!("../../kernels/launch.cuh")),
    ("scaling.cuh", include_str!("../../kernels/scaling.cuh")),
    ("turn.cuh", include_str!("../../kernels/turn.cuh")),
];

/// Bytes per tensor of what blocks that find leave for those that update: `Found` of `launch.cuh`.
const FOUND_BYTES: usize = 28;

/// Bytes that a launch over scaled states needs for itself.
pub fn found_bytes(table: &Table) -> usize {
    FOUND_BYTES * (table.len() + 1)
}

/// Bytes of kernel parameters that every driver takes.
pub const SMALL_PARAMETERS: usize = 4096;
/// Bytes that CUDA 12.1 and later take.
pub const LARGE_PARAMETERS: usize = 32764;
const LARGE_PARAMETERS_SINCE: i32 = 12010;
/// bf16 conversions are instructions from this architecture on.
const OLDEST_ARCH: i32 = 80;

/// Constants of Adam's kernels that differ in speed only.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// Threads of a block.
    pub threads: u32,
    /// Elements that a thread moves at once.
    pub vector: u32,
    /// How many times that before it computes.
    pub unroll: u32,
    /// Chunks between finding a chunk's magnitudes and updating it. More than run at once, so that few blocks wait; few
    /// enough for what was read to be in the cache still.
    pub lag: u32,
}

impl Tuning {
    /// The fastest of benches/tune.py on an H200, together with `CHUNK`.
    pub fn of(variant: Variant) -> Tuning {
        if variant.two_passes() {
            Tuning { threads: 256, vector: 4, unroll: 1, lag: 512 }
        } else {
            Tuning { threads: 256, vector: 4, unroll: 2, lag: 0 }
        }
    }
}

/// For kernels that copy: a whole chunk is in flight at once.
const CAST_TUNING: Tuning = Tuning { threads: 256, vector: 4, unroll: 4, lag: 0 };

/// Options that compile one kernel.
pub fn options(variant: Variant, parameter_bytes: usize, arch: i32, tuning: Tuning) -> Vec<String> {
    let name = |dtype: Dtype| dtype.kernel_name().unwrap_or("unsupported");
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
    let mut options = common(arch, capacity(parameter_bytes, variant.operands()), tuning);
    options.extend([
        format!("-DGRAD={}", name(variant.grad)),
        format!("-DPARAM={}", name(variant.param)),
        format!("-DEXP_AVG={}", name(variant.exp_avg)),
        format!("-DEXP_AVG_SQ={}", name(variant.exp_avg_sq)),
        format!("-DMASTER={master}"),
        format!("-DPARAM_SCALING={}", scaling(Role::Param)),
        format!("-DEXP_AVG_SCALING={}", scaling(Role::ExpAvg)),
        format!("-DEXP_AVG_SQ_SCALING={}", scaling(Role::ExpAvgSq)),
        format!("-DCAPTURABLE={}", u8::from(variant.capturable)),
        format!("-DLAG={}", tuning.lag),
    ]);
    options
}

/// Options that compile one kernel that copies.
pub fn cast_options(cast: Cast, parameter_bytes: usize, arch: i32) -> Vec<String> {
    let name = |dtype: Dtype| if dtype == Dtype::I16 { "I16" } else { dtype.kernel_name().unwrap_or("unsupported") };
    let write = match cast.write {
        Scaled::No | Scaled::Param => 0,
        Scaled::Factor => 1,
        Scaled::State => 2,
    };
    let mut options = common(arch, capacity(parameter_bytes, cast.operands()), CAST_TUNING);
    options.extend([
        format!("-DSOURCE={}", name(cast.source)),
        format!("-DTARGET={}", name(cast.target)),
        format!("-DSOURCE_SCALING={}", u8::from(cast.read)),
        format!("-DTARGET_SCALING={write}"),
    ]);
    options
}

fn common(arch: i32, capacity: usize, tuning: Tuning) -> Vec<String> {
    vec![
        format!("--gpu-architecture=sm_{arch}"),
        "--std=c++17".to_owned(),
        "--ptxas-options=-v".to_owned(),
        format!("-DCAPACITY={capacity}"),
        format!("-DTHREADS={}", tuning.threads),
        format!("-DVECTOR={}", tuning.vector),
        format!("-DUNROLL={}", tuning.unroll),
        format!("-DCHUNK={CHUNK}"),
    ]
}

/// Compiles an Adam kernel without a device.
pub fn compile(options: &[String]) -> Result<Compiled> {
    nvrtc::compile(ADAM, &HEADERS, options)
}

/// Compiles a kernel that copies without a device.
pub fn compile_cast(options: &[String]) -> Result<Compiled> {
    nvrtc::compile(CAST, &HEADERS, options)
}

/// What is known of a variant's arithmetic on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// Its results were stock's, bit for bit.
    Equal,
    /// It cannot or must not be used, and why.
    Unusable(String),
}

/// The functions of one cast.
#[derive(Clone, Copy)]
struct Loaded {
    /// The pass that writes.
    write: Function,
    /// The pass before it, to states that are scaled.
    absmax: Option<Function>,
}

/// The kernels of one device.
pub struct Kernels {
    gpu: Gpu,
    cache: Cache,
    compiler: String,
    parameter_bytes: usize,
    #[cfg(feature = "tune")]
    tuned: Option<Tuning>,
    loaded: HashMap<(Variant, usize), Function>,
    casts: HashMap<(Cast, usize), Loaded>,
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
            #[cfg(feature = "tune")]
            tuned: None,
            loaded: HashMap::new(),
            casts: HashMap::new(),
            proofs: HashMap::new(),
            parameter: Vec::new(),
        })
    }

    /// Builds Adam's kernels anew with other constants, and has them compared with stock's again.
    #[cfg(feature = "tune")]
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuned = Some(tuning);
        self.loaded.clear();
        self.proofs.clear();
    }

    fn tuning(&self, variant: Variant) -> Tuning {
        #[cfg(feature = "tune")]
        if let Some(tuning) = self.tuned {
            return tuning;
        }
        Tuning::of(variant)
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

    /// Updates a table's tensors. Where states are scaled, `header.found` is the address of `found_bytes(table)` bytes.
    ///
    /// # Safety
    /// Every tensor with a gradient has `numel` elements of the variant's types at its addresses, valid on `stream`.
    pub unsafe fn launch(&mut self, variant: Variant, table: &Table, header: &Header, stream: Stream) -> Result<()> {
        let (function, bytes) = self.function(variant, table)?;
        table.write_parameter(header, capacity(bytes, variant.operands()), &mut self.parameter);
        let mut blocks = table.chunks();
        if variant.two_passes() {
            blocks *= 2;
            // SAFETY: the caller's promise.
            unsafe { self.gpu.clear(header.found, found_bytes(table), stream) }?;
        }
        // SAFETY: the parameter was written for this kernel's capacity; the addresses are the caller's promise.
        unsafe { self.gpu.launch(function, blocks, self.tuning(variant).threads, stream, &self.parameter) }
    }

    /// Compiles and loads what a cast takes, so that no launch of it can fail for want of it.
    pub fn prepare_cast(&mut self, cast: Cast) -> Result<()> {
        [SMALL_PARAMETERS, self.parameter_bytes]
            .into_iter()
            .try_for_each(|bytes| self.cast_function(cast, bytes).map(|_| ()))
    }

    /// Runs one pass of a cast over a table: the one that finds the largest magnitudes, or the one that writes.
    ///
    /// # Safety
    /// Every address in the table is that of `numel` elements of the cast's types or, for scaling, of one element,
    /// valid on `stream`.
    pub unsafe fn cast(&mut self, cast: Cast, table: &Table, absmax: bool, stream: Stream) -> Result<()> {
        let bytes = Kernels::smallest(table.len(), cast.operands());
        let loaded = self.cast_function(cast, bytes)?;
        let Some(function) = (if absmax { loaded.absmax } else { Some(loaded.write) }) else { return Ok(()) };
        table.write_parameter(&Header::default(), capacity(bytes, cast.operands()), &mut self.parameter);
        // SAFETY: the parameter was written for this kernel's capacity; the addresses are the caller's promise.
        unsafe { self.gpu.launch(function, table.chunks(), CAST_TUNING.threads, stream, &self.parameter) }
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The smallest parameter that holds a table, since the driver copies all of it.
    fn smallest(tensors: usize, operands: usize) -> usize {
        if tensors <= capacity(SMALL_PARAMETERS, operands) { SMALL_PARAMETERS } else { LARGE_PARAMETERS }
    }

    fn function(&mut self, variant: Variant, table: &Table) -> Result<(Function, usize)> {
        let bytes = Kernels::smallest(table.len(), variant.operands());
        if let Some(&function) = self.loaded.get(&(variant, bytes)) {
            return Ok((function, bytes));
        }
        let function = self.build(ADAM, &options(variant, bytes, self.gpu.arch, self.tuning(variant)), &["adam"])?[0];
        self.loaded.insert((variant, bytes), function);
        Ok((function, bytes))
    }

    fn cast_function(&mut self, cast: Cast, bytes: usize) -> Result<Loaded> {
        if let Some(&loaded) = self.casts.get(&(cast, bytes)) {
            return Ok(loaded);
        }
        let names = if cast.two_passes() { &["cast", "cast_absmax"][..] } else { &["cast"] };
        let functions = self.build(CAST, &cast_options(cast, bytes, self.gpu.arch), names)?;
        let loaded = Loaded { write: functions[0], absmax: functions.get(1).copied() };
        self.casts.insert((cast, bytes), loaded);
        Ok(loaded)
    }

    /// Functions of these names, from the disk or compiled.
    fn build(&self, source: File, options: &[String], names: &[&str]) -> Result<Vec<Function>> {
        let mut key = vec![self.compiler.as_bytes(), source.1.as_bytes()];
        key.extend(HEADERS.iter().map(|file| file.1.as_bytes()));
        key.extend(options.iter().map(|option| option.as_bytes()));
        let compile = || nvrtc::compile(source, &HEADERS, options).map(|compiled| compiled.cubin);
        self.gpu.load(&self.cache.get_or(&key, compile)?, names)
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
                        // Transformer Engine's capturable kernels take fp32 or bf16 moments, both alike, and fp32
                        // masters.
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
