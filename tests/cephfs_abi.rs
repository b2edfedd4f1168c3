//! `backend::ceph::ffi` says of libcephfs what its header says: layouts, numbers, and the type of every
//! function. And what is said when the library is not there.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::{Command, Output};

use common::EVERMOUNT;
use evermount::backend::ceph::{self, ffi};
use tempfile::TempDir;

/// `cc` on a program that includes the header (Debian: libcephfs-dev).
fn compile(dir: &Path, program: &str) -> Output {
    let source = dir.join("abi.c");
    fs::write(&source, program).unwrap();
    Command::new("timeout")
        .args(["60", "cc", "-std=gnu11", "-D_FILE_OFFSET_BITS=64", "-Wall"])
        .args(["-Werror=incompatible-pointer-types", "-Werror"])
        .arg(&source)
        .arg("-o")
        .arg(dir.join("abi"))
        .output()
        .expect("cc")
}

const INCLUDES: &str = "#define FUSE_USE_VERSION 31\n\
    #include <stdio.h>\n#include <stddef.h>\n#include <dirent.h>\n#include <fcntl.h>\n\
    #include <sys/statvfs.h>\n#include <sys/uio.h>\n#include <cephfs/libcephfs.h>\n";

/// A C expression, and what it has to be.
type Wanted = BTreeMap<&'static str, u64>;

/// Layouts and numbers as they are on this side.
fn wanted() -> Wanted {
    let mut wanted = Wanted::new();
    macro_rules! layout {
        ($rust:ty, $c:literal: $($field:ident $cfield:literal),*) => {
            wanted.insert(concat!("sizeof(", $c, ")"), size_of::<$rust>() as u64);
            $(wanted.insert(
                concat!("offsetof(", $c, ", ", $cfield, ")"),
                offset_of!($rust, $field) as u64,
            );)*
        };
    }
    layout!(ffi::Vino, "vinodeno_t": ino "ino", snapid "snapid");
    layout!(ffi::Statx, "struct ceph_statx":
        mask "stx_mask", blksize "stx_blksize", nlink "stx_nlink", uid "stx_uid", gid "stx_gid",
        mode "stx_mode", ino "stx_ino", size "stx_size", blocks "stx_blocks", dev "stx_dev",
        rdev "stx_rdev", atime "stx_atime", ctime "stx_ctime", mtime "stx_mtime",
        btime "stx_btime", version "stx_version");
    layout!(ffi::CallbackArgs, "struct ceph_client_callback_args":
        handle "handle", ino_cb "ino_cb", dentry_cb "dentry_cb",
        switch_intr_cb "switch_intr_cb", remount_cb "remount_cb", umask_cb "umask_cb",
        ino_release_cb "ino_release_cb");
    // Those of the C library that the functions take, with 64-bit offsets.
    layout!(libc::dirent, "struct dirent":
        d_ino "d_ino", d_off "d_off", d_reclen "d_reclen", d_type "d_type", d_name "d_name");
    layout!(libc::statvfs, "struct statvfs":
        f_bsize "f_bsize", f_frsize "f_frsize", f_blocks "f_blocks", f_bfree "f_bfree",
        f_bavail "f_bavail", f_files "f_files", f_ffree "f_ffree", f_namemax "f_namemax");
    layout!(libc::flock, "struct flock":
        l_type "l_type", l_whence "l_whence", l_start "l_start", l_len "l_len", l_pid "l_pid");
    layout!(libc::iovec, "struct iovec": iov_base "iov_base", iov_len "iov_len");
    wanted.extend([
        ("CEPH_STATX_BASIC_STATS", u64::from(ffi::STATX_BASIC)),
        ("CEPH_STATX_BTIME", u64::from(ffi::STATX_BTIME)),
        ("CEPH_STATX_MTIME", u64::from(ffi::STATX_MTIME)),
        ("CEPH_STATX_VERSION", u64::from(ffi::STATX_VERSION)),
        ("AT_STATX_DONT_SYNC", u64::from(ffi::DONT_SYNC)),
        ("CEPH_DELEGATION_NONE", u64::from(ffi::delegation::NONE)),
        ("CEPH_DELEGATION_RD", u64::from(ffi::delegation::RD)),
        ("CEPH_DELEGATION_WR", u64::from(ffi::delegation::WR)),
        ("CEPH_SETATTR_MODE", ffi::setattr::MODE as u64),
        ("CEPH_SETATTR_UID", ffi::setattr::UID as u64),
        ("CEPH_SETATTR_GID", ffi::setattr::GID as u64),
        ("CEPH_SETATTR_MTIME", ffi::setattr::MTIME as u64),
        ("CEPH_SETATTR_ATIME", ffi::setattr::ATIME as u64),
        ("CEPH_SETATTR_SIZE", ffi::setattr::SIZE as u64),
        ("CEPH_SETATTR_CTIME", ffi::setattr::CTIME as u64),
        ("CEPH_SETATTR_MTIME_NOW", ffi::setattr::MTIME_NOW as u64),
        ("CEPH_SETATTR_ATIME_NOW", ffi::setattr::ATIME_NOW as u64),
        ("CEPH_RECLAIM_RESET", u64::from(ffi::RECLAIM_RESET)),
        ("CEPH_NOSNAP", ffi::NOSNAP),
        ("CEPH_SNAPDIR", ffi::SNAPDIR),
    ]);
    wanted
}

#[test]
fn layouts_and_numbers_are_those_of_the_header() {
    let wanted = wanted();
    let dir = TempDir::new().unwrap();
    let mut program = INCLUDES.to_owned();
    // Not for users of the library: from its own sources, and from what it documents.
    program += "#ifndef CEPH_NOSNAP\n#define CEPH_NOSNAP ((uint64_t)(-2))\n#endif\n\
        #ifndef CEPH_SNAPDIR\n#define CEPH_SNAPDIR ((uint64_t)(-1))\n#endif\n";
    program += "int main(void) {\n";
    for expression in wanted.keys() {
        program += &format!(
            "  printf(\"%s=%llu\\n\", \"{expression}\", (unsigned long long)({expression}));\n"
        );
    }
    program += "  return 0;\n}\n";
    let compiled = compile(dir.path(), &program);
    let problems = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{problems}");
    let output = Command::new(dir.path().join("abi")).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let found: BTreeMap<&str, u64> = text
        .lines()
        .map(|line| line.split_once('=').unwrap())
        .map(|(expression, value)| (expression, value.parse().unwrap()))
        .collect();
    assert_eq!(found, wanted);
    eprintln!("{} layouts and numbers agree", found.len());
}

/// The C type that is called so in `ffi.rs`.
fn c_type(rust: &str) -> &'static str {
    match rust {
        "Mount" => "struct ceph_mount_info *",
        "*mut Mount" => "struct ceph_mount_info **",
        "Inode" => "struct Inode *",
        "*mut Inode" => "struct Inode **",
        "Fh" => "struct Fh *",
        "*mut Fh" => "struct Fh **",
        "Dir" => "struct ceph_dir_result *",
        "*mut Dir" => "struct ceph_dir_result **",
        "Perms" => "const UserPerm *",
        "*mut CephPerms" => "UserPerm *",
        "Vino" => "vinodeno_t",
        "*mut Statx" => "struct ceph_statx *",
        "*mut CallbackArgs" => "struct ceph_client_callback_args *",
        "Str" | "*const c_char" => "const char *",
        "*mut c_char" => "char *",
        "*mut c_void" => "void *",
        "*const c_void" => "const void *",
        "c_int" => "int",
        "*mut c_int" => "int *",
        "c_uint" => "unsigned int",
        "i64" => "int64_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "Recall" => "ceph_deleg_cb_t",
        "usize" => "size_t",
        "*mut usize" => "size_t *",
        "libc::uid_t" => "uid_t",
        "libc::gid_t" => "gid_t",
        "*mut libc::gid_t" => "gid_t *",
        "libc::mode_t" => "mode_t",
        "libc::dev_t" => "dev_t",
        "*const libc::iovec" => "const struct iovec *",
        "*mut libc::statvfs" => "struct statvfs *",
        "*mut libc::dirent" => "struct dirent *",
        "*mut libc::flock" => "struct flock *",
        other => panic!("no C type for {other}"),
    }
}

/// A declaration of a pointer to that function, with the types of `ffi.rs`.
fn pointer(name: &str, arguments: &[&str], returned: Option<&str>) -> String {
    let arguments: Vec<&str> = arguments.iter().map(|a| c_type(a)).collect();
    format!(
        "{} (*const check_{name})({}) = {name};\n",
        returned.map_or("void", c_type),
        arguments.join(", ")
    )
}

/// The callbacks of `ffi::CallbackArgs`.
const CALLBACKS: &str = "static void ino(void *h, vinodeno_t i, int64_t o, int64_t l) {}\n\
    static void dentry(void *h, vinodeno_t d, vinodeno_t i, const char *n, size_t l) {}\n\
    static void intr(void *h, void *d) {}\n\
    static int again(void *h) { return 0; }\n\
    static mode_t mask(void *h) { return 0; }\n\
    static void let_go(void *h, vinodeno_t i) {}\n\
    const struct ceph_client_callback_args check_callbacks = {\n\
      .ino_cb = ino, .dentry_cb = dentry, .switch_intr_cb = intr, .remount_cb = again,\n\
      .umask_cb = mask, .ino_release_cb = let_go };\n";

fn with_pointers(pointers: impl Iterator<Item = String>) -> String {
    let pointers: String = pointers.collect();
    // Only the types are looked at: nothing is linked to the library.
    format!("{INCLUDES}{pointers}{CALLBACKS}int main(void) {{ return 0; }}\n")
        .replace("*const check_", "*check_")
}

fn compile_only(dir: &Path, program: &str) -> Result<(), String> {
    let source = dir.join("types.c");
    fs::write(&source, program).unwrap();
    let output = Command::new("timeout")
        .args(["60", "cc", "-std=gnu11", "-D_FILE_OFFSET_BITS=64", "-c"])
        .args(["-Werror=incompatible-pointer-types", "-Werror"])
        .arg(&source)
        .arg("-o")
        .arg(dir.join("types.o"))
        .output()
        .expect("cc");
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn every_function_has_the_type_of_the_header() {
    let dir = TempDir::new().unwrap();
    let pointers = || ffi::SIGNATURES.iter().map(|(n, a, r)| pointer(n, a, *r));
    assert!(pointers().count() > 50);
    compile_only(dir.path(), &with_pointers(pointers())).unwrap();
    // What is used only where the library has it.
    let name = "ceph_ll_register_callbacks2";
    let header = fs::read_to_string("/usr/include/cephfs/libcephfs.h").unwrap_or_default();
    if header.contains(name) {
        let later = pointer(name, &["Mount", "*mut CallbackArgs"], Some("c_int"));
        compile_only(dir.path(), &with_pointers([later].into_iter())).unwrap();
    }

    // The check itself notices a width, a sign, a missing argument, another return type.
    for wrong in [
        pointer("ceph_ll_fsync", &["Mount", "Fh", "i64"], Some("c_int")),
        pointer(
            "ceph_ll_sync_inode",
            &["Mount", "Inode", "c_uint"],
            Some("c_int"),
        ),
        pointer("ceph_mount", &["Mount"], Some("c_int")),
        pointer("ceph_finish_reclaim", &["Mount"], Some("c_int")),
    ] {
        let refused = compile_only(dir.path(), &with_pointers([wrong.clone()].into_iter()));
        let problems = refused.expect_err(&wrong);
        assert!(
            problems.contains("incompatible-pointer-types"),
            "{problems}"
        );
    }
}

#[test]
fn the_library_loads_and_tells_its_version() {
    let version = ceph::version().unwrap();
    println!("libcephfs {version}");
    let major: u32 = version.split('.').next().unwrap().parse().unwrap();
    assert!(major >= 16, "{version}");
}

/// Runs a shell script with `$EVERMOUNT`, and the directory `$DIR`, where the library cannot be found
/// (by anybody in this mount namespace).
fn without_library(dir: &Path, script: &str) -> Output {
    const HIDE: &str = r#"set -e
        hidden=0
        for library in $(ldconfig -p | sed -n 's/.*libcephfs\.so\.2 .*=> //p'); do
            lib=$(dirname "$(readlink -f "$library")")
            mkdir "$DIR/layer$hidden"
            mount -t tmpfs tmpfs "$DIR/layer$hidden"
            mkdir "$DIR/layer$hidden/upper" "$DIR/layer$hidden/work"
            mount -t overlay -o "lowerdir=$lib,upperdir=$DIR/layer$hidden/upper,workdir=$DIR/layer$hidden/work" \
                overlay "$lib"
            rm "$lib"/libcephfs.so.2*
            hidden=$((hidden + 1))
        done
        test "$hidden" -gt 0
        set +e
    "#;
    Command::new("timeout")
        .args(["60", "unshare", "-m", "sh", "-c"])
        .arg(format!("{HIDE}\n{script}"))
        .env("DIR", dir)
        .env("EVERMOUNT", EVERMOUNT)
        .env("EVERMOUNT_RUNTIME_DIR", dir.join("run"))
        .output()
        .unwrap()
}

#[test]
fn a_missing_library_is_an_error_that_names_its_package() {
    let dir = TempDir::new().unwrap();
    fs::create_dir(dir.path().join("mnt")).unwrap();
    let output = without_library(
        dir.path(),
        r#""$EVERMOUNT" mount ceph:/ "$DIR/mnt" --mon 127.0.0.1:1"#,
    );
    let errors = String::from_utf8_lossy(&output.stderr);
    eprintln!("{errors}");
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(errors.contains("libcephfs.so.2"), "{errors}");
    assert!(
        errors.contains("install the package libcephfs2"),
        "{errors}"
    );

    // Everything else goes on without it, and `doctor` knows.
    let dir = TempDir::new().unwrap();
    let output = without_library(dir.path(), r#""$EVERMOUNT" doctor"#);
    let findings = String::from_utf8_lossy(&output.stdout);
    let at = findings.find("libcephfs").expect(&findings);
    let begin = findings[..at].rfind('\n').map_or(0, |n| n + 1);
    assert!(findings[begin..].starts_with("info "), "{findings}");
    assert!(
        findings.contains("install the package libcephfs2"),
        "{findings}"
    );
    assert!(output.status.success(), "{output:?}");
    let dir = TempDir::new().unwrap();
    let output = without_library(
        dir.path(),
        r#"mkdir "$DIR/src" "$DIR/mnt" && "$EVERMOUNT" mount "dir:$DIR/src" "$DIR/mnt" &&
            "$EVERMOUNT" umount "$DIR/mnt""#,
    );
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn doctor_names_the_version_of_the_library() {
    let dir = TempDir::new().unwrap();
    let output = Command::new(EVERMOUNT)
        .arg("doctor")
        .env("EVERMOUNT_RUNTIME_DIR", dir.path().join("run"))
        .output()
        .unwrap();
    let findings = String::from_utf8_lossy(&output.stdout);
    let wanted = format!("Ceph library: libcephfs {}", ceph::version().unwrap());
    assert!(findings.contains(&wanted), "{findings}");
}
