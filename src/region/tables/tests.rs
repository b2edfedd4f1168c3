use std::ffi::OsStr;

use super::*;
use crate::region::Identity;
use crate::wire::abi::Attr;

fn id(n: u64) -> Identity {
    Identity::new(&[b"ext4:".as_slice(), &n.to_le_bytes()].concat()).unwrap()
}

fn attr(ino: u64) -> Attr {
    Attr {
        ino,
        mode: libc::S_IFREG | 0o644,
        size: 10 * ino,
        ..Attr::default()
    }
}

fn tables() -> Tables {
    let mut tables = Tables::create().unwrap();
    tables.set_root(&id(0), &attr(1));
    tables
}

#[test]
fn an_inode_is_found_by_id_identity_and_name_until_it_is_forgotten() {
    let mut t = tables();
    let a = t
        .look_up(&id(5), Some((1, OsStr::new("hello"))), &attr(5))
        .unwrap();
    assert_eq!(t.find(&id(5)), Some(a));
    assert_eq!(t.find_name(1, OsStr::new("hello")), Some(a));
    assert_eq!(t.path(a, 100).unwrap(), b"hello");
    assert_eq!(t.node(1).unwrap().identity, id(0));
    assert_eq!(
        t.forget(a, 1),
        Forget::Gone {
            identity: id(5),
            vaulted: false
        }
    );
    assert_eq!(t.find(&id(5)), None);
    assert_eq!(t.node(a), None);
    let b = t.look_up(&id(5), None, &attr(5)).unwrap();
    assert_ne!(a, b);
    assert_eq!(t.inodes(), 2);
}
