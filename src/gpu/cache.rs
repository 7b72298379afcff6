//! Compiled kernels kept on disk between processes. Knows files and hashes only.
//! Invariant: a file is read back only if it is whole and was written for exactly this key; a fault of the disk costs a
//! compilation, never an error. Files appear by rename, so any number of processes may start together.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// `$TE_PATCHES_CACHE`, else `te_patches` in `$XDG_CACHE_HOME` or `~/.cache`; none of them: no cache.
    pub fn from_environment() -> Cache {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let base = || variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")));
        Cache { folder: variable("TE_PATCHES_CACHE").or_else(|| base().map(|base| base.join("te_patches"))) }
    }

    /// Where it is, if anywhere.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// A cache in `folder`.
    pub fn in_folder(folder: &Path) -> Cache {
        Cache { folder: Some(folder.to_owned()) }
    }

    /// What was stored under `key`, or what `make` makes, stored for the next time.
    pub fn get_or<E>(&self, key: &[&[u8]], make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
        let mut hasher = blake3::Hasher::new();
        for part in key {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        let key = hasher.finalize();
        let path = self.folder.as_ref().map(|folder| folder.join(format!("{}.cubin", key.to_hex())));
        if let Some(content) = path.as_ref().and_then(|path| fs::read(path).ok()).and_then(|file| verified(&key, file))
        {
            return Ok(content);
        }
        let content = make()?;
        if let Some(path) = path {
            // A disk that is full, read-only or gone leaves the kernel uncached.
            let _ = write(&path, &key, &content);
        }
        Ok(content)
    }
}

/// Hash that closes a file: it binds the content to its key.
fn seal(key: &blake3::Hash, content: &[u8]) -> blake3::Hash {
    blake3::keyed_hash(key.as_bytes(), content)
}

fn verified(key: &blake3::Hash, mut file: Vec<u8>) -> Option<Vec<u8>> {
    let length = file.len().checked_sub(blake3::OUT_LEN)?;
    let whole = file[length..] == *seal(key, &file[..length]).as_bytes();
    file.truncate(length);
    whole.then_some(file)
}

fn write(path: &Path, key: &blake3::Hash, content: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(content)?;
    file.write_all(seal(key, content).as_bytes())?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::process::{Command, Stdio};

    fn get(cache: &Cache, key: &str, content: &[u8]) -> (Vec<u8>, bool) {
        let mut made = false;
        let result = cache.get_or(&[key.as_bytes()], || {
            made = true;
            Ok::<_, Infallible>(content.to_vec())
        });
        (result.expect("infallible"), made)
    }

    #[test]
    fn a_kernel_is_made_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::in_folder(folder.path());
        assert_eq!(get(&cache, "a", b"one"), (b"one".to_vec(), true));
        assert_eq!(get(&cache, "a", b"two"), (b"one".to_vec(), false));
        assert_eq!(get(&cache, "b", b"two"), (b"two".to_vec(), true));
    }

    #[test]
    fn a_truncated_or_foreign_file_is_made_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::in_folder(folder.path());
        get(&cache, "a", b"content");
        let path = fs::read_dir(folder.path()).expect("listing").next().expect("a file").expect("entry").path();
        for damage in [&b"cont"[..], b"", b"something else that is long enough to hold a seal of thirty-two bytes"] {
            fs::write(&path, damage).expect("writing");
            assert_eq!(get(&cache, "a", b"again"), (b"again".to_vec(), true));
        }
        assert_eq!(get(&cache, "a", b"third"), (b"again".to_vec(), false));
    }

    /// Runs the test `name` of this module in processes of their own that see `folder`; how they ended.
    fn in_processes(name: &str, count: usize, folder: &Path, before: &str) -> Vec<bool> {
        let start = |_| {
            Command::new("sh")
                .args(["-c", &format!("{before} exec \"$0\" \"$@\"")])
                .arg(std::env::current_exe().expect("this test"))
                .args(["--exact", &format!("gpu::cache::tests::{name}")])
                .env(FOLDER, folder)
                .stdout(Stdio::null())
                .spawn()
                .expect("a process")
        };
        let children: Vec<_> = (0..count).map(start).collect();
        children.into_iter().map(|mut child| child.wait().expect("its end").success()).collect()
    }

    const FOLDER: &str = "TE_PATCHES_TEST_FOLDER";
    const KEYS: [&str; 4] = ["a", "b", "c", "d"];

    fn files(folder: &Path) -> usize {
        fs::read_dir(folder).expect("listing").count()
    }

    #[test]
    fn sixty_four_processes_that_start_at_once_share_a_folder() {
        let content = vec![7; 1 << 20];
        if let Some(folder) = std::env::var_os(FOLDER) {
            let cache = Cache::in_folder(Path::new(&folder));
            for key in KEYS {
                assert_eq!(get(&cache, key, &content).0, content);
            }
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let name = "sixty_four_processes_that_start_at_once_share_a_folder";
        assert_eq!(in_processes(name, 64, folder.path(), ""), [true; 64]);
        assert_eq!(files(folder.path()), KEYS.len());
        for key in KEYS {
            assert_eq!(get(&Cache::in_folder(folder.path()), key, b""), (content.clone(), false));
        }
    }

    #[test]
    fn a_disk_that_fills_up_half_way_only_costs_time() {
        if let Some(folder) = std::env::var_os(FOLDER) {
            let cache = Cache::in_folder(Path::new(&folder));
            for _ in 0..2 {
                assert_eq!(get(&cache, "a", &[7; 1 << 20]), (vec![7; 1 << 20], true));
            }
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        // No file may grow beyond a few KiB, and the signal that says so is ignored.
        let limit = "trap '' XFSZ; ulimit -f 8;";
        assert_eq!(in_processes("a_disk_that_fills_up_half_way_only_costs_time", 1, folder.path(), limit), [true]);
        assert_eq!(files(folder.path()), 0, "what could not be finished is gone");
    }

    #[test]
    fn a_folder_that_cannot_be_written_only_costs_time() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let cache = Cache::in_folder(&file.path().join("below a file"));
        assert_eq!(get(&cache, "a", b"one"), (b"one".to_vec(), true));
        assert_eq!(get(&cache, "a", b"two"), (b"two".to_vec(), true));
    }
}
