//! The threads of the CPU kernels and casts. Invariant: they are this process's own. A fork takes none along, and work
//! handed to threads that are gone would never end, so a child gets threads of its own at first use.

use std::sync::{Mutex, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

/// The pool, and the process that made it.
static POOL: Mutex<Option<(u32, &'static ThreadPool)>> = Mutex::new(None);

/// Runs `work`, whose parallel iterators use the pool: as many threads as the machine has cores, or `RAYON_NUM_THREADS`.
pub fn install<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    match pool() {
        Some(pool) => pool.install(work),
        // No thread could be started: rayon's own pool then runs on the calling one.
        None => work(),
    }
}

fn pool() -> Option<&'static ThreadPool> {
    let mut known = POOL.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    match *known {
        Some((maker, pool)) if maker == process => Some(pool),
        _ => {
            // Never dropped: to drop a parent's pool would be to wait for its threads.
            let pool: &'static ThreadPool = Box::leak(Box::new(ThreadPoolBuilder::new().build().ok()?));
            *known = Some((process, pool));
            Some(pool)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_has_one_pool() {
        let first = pool().expect("threads");
        assert!(std::ptr::eq(first, pool().expect("threads")));
        assert_eq!(install(rayon::current_num_threads), first.current_num_threads());
    }
}
