//! UNSAFE: compiles CUDA source to machine code with NVRTC, found at run time. Knows nothing of what is compiled.

use std::ffi::{CStr, CString, c_char};
use std::ptr;

use anyhow::{Result, bail};
use cudarc::nvrtc::{result, sys};

/// A source file by name.
pub type File = (&'static str, &'static str);

/// Machine code and what the compiler said.
pub struct Compiled {
    /// Machine code for the one architecture asked for.
    pub cubin: Vec<u8>,
    /// The compiler's log: with `--ptxas-options=-v`, registers and spills.
    pub log: String,
}

/// NVRTC's version as (major, minor).
pub fn version() -> Result<(i32, i32)> {
    require()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to live integers.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().map_err(describe)?;
    Ok((major, minor))
}

/// Compiles `source`, which may include `headers`.
pub fn compile(source: File, headers: &[File], options: &[String]) -> Result<Compiled> {
    require()?;
    let c_string = |text: &str| CString::new(text).map_err(anyhow::Error::from);
    let (name, text) = (c_string(source.0)?, c_string(source.1)?);
    let names = headers.iter().map(|file| c_string(file.0)).collect::<Result<Vec<_>>>()?;
    let texts = headers.iter().map(|file| c_string(file.1)).collect::<Result<Vec<_>>>()?;
    let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>>>()?;
    let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
    let (names, texts, options_at) = (pointers(&names), pointers(&texts), pointers(&options));

    let mut program = Program(ptr::null_mut());
    // SAFETY: every string is null-terminated and outlives the call, which copies them; the counts are the lengths.
    let created = unsafe {
        let count = headers.len() as i32;
        sys::nvrtcCreateProgram(&mut program.0, text.as_ptr(), name.as_ptr(), count, texts.as_ptr(), names.as_ptr())
    };
    created.result().map_err(describe)?;
    // SAFETY: the program is live and the options outlive the call.
    let compiled = unsafe { sys::nvrtcCompileProgram(program.0, options_at.len() as i32, options_at.as_ptr()) };
    let log = program.log()?;
    if let Err(error) = compiled.result() {
        bail!("NVRTC could not compile {}: {}\n{log}", source.0, describe(error));
    }
    Ok(Compiled { cubin: program.cubin()?, log })
}

/// cudarc panics where a library is missing; ask first.
fn require() -> Result<()> {
    // SAFETY: loading a library runs its initialisers, which NVRTC's are made for.
    if !unsafe { sys::is_culib_present() } {
        bail!(
            "the library NVRTC (libnvrtc) was not found; it comes with torch's CUDA builds (package nvidia-cuda-nvrtc)"
        );
    }
    Ok(())
}

fn describe(error: result::NvrtcError) -> anyhow::Error {
    // SAFETY: NVRTC returns a static null-terminated string for every code.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(error.0)) };
    anyhow::anyhow!("NVRTC: {}", text.to_string_lossy())
}

/// Owns an NVRTC program.
struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> Result<String> {
        let mut size = 0;
        // SAFETY: the program is live, the pointer is to a live integer.
        unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut size) }.result().map_err(describe)?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the buffer has the size that NVRTC asked for.
        unsafe { sys::nvrtcGetProgramLog(self.0, bytes.as_mut_ptr().cast()) }.result().map_err(describe)?;
        Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is live, the pointer is to a live integer.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut size) }.result().map_err(describe)?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the buffer has the size that NVRTC asked for.
        unsafe { sys::nvrtcGetCUBIN(self.0, bytes.as_mut_ptr().cast()) }.result().map_err(describe)?;
        Ok(bytes)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the program is live and destroyed once.
            unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
        }
    }
}
